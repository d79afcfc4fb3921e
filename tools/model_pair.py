"""Which target and draft head a command uses when the user names both, one or neither."""

from __future__ import annotations


def resolve_pair(target: str | None, head: str | None, needs_head: bool = True) -> tuple[str, str]:
    """(target, head) as given, the demo pair filling in what is not.

    A head alone is one for the demo target. A target alone raises ValueError, unless no head is
    needed (then the head is empty). Prepares the demo target if it is the one.
    """
    from sglang_jetspec.tools.demo_target import demo_head_path, prepare_demo_target

    if target is not None and head is None:
        if needs_head:
            raise ValueError(
                f"--target is {target}, --head is missing: the demo head fits the demo target "
                "only; name a JetSpec head trained for this target"
            )
        return target, ""
    return target or str(prepare_demo_target()), head or str(demo_head_path())
