"""Every serving option of JETSPEC in one frozen object.

Sources, first one that sets an option wins:

1. SGLang's own flags: ``--speculative-num-draft-tokens`` (tree budget, root included),
   ``--speculative-eagle-topk`` (width), ``--speculative-num-steps`` (depth);
2. the ``jetspec`` block of the head's ``config.json``;
3. the environment: ``SGLANG_JETSPEC_NUM_DRAFT_TOKENS``, ``..._WIDTH``, ``..._DEPTH``, ``..._TREE``;
4. defaults that follow the device and the head's block size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.trees import TREE_BUILDERS, max_nodes

MAX_NODES = 256
ENVIRONMENT_PREFIX = "SGLANG_JETSPEC_"
# Read elsewhere: where the demo target is kept, and the CPU platform's own switches.
_OTHER_VARIABLES = frozenset({"CACHE", "CAUSAL", "CPU_OPS", "CPU_OVERLAP"})
_FLAGS = {
    "num_draft_tokens": "--speculative-num-draft-tokens",
    "width": "--speculative-eagle-topk",
    "depth": "--speculative-num-steps",
}


class OptionError(ValueError):
    """An option JETSPEC cannot serve; the message names it, its value and the fix."""


class PartialOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one source sets; ``None`` leaves the option to the next source."""

    num_draft_tokens: int | None = None
    width: int | None = None
    depth: int | None = None
    tree: str | None = None


class HeadBlock(PartialOptions, frozen=True, forbid_unknown_fields=True):
    """The ``jetspec`` block of a head's ``config.json``: options and format extensions."""

    draft_vocab_size: int | None = None
    token_input: bool = False
    draft_shift: bool = False


class Options(msgspec.Struct, frozen=True):
    """Resolved options.

    num_draft_tokens: tree budget N, root included, 2..256.
    width: most children a node may have, W >= 1.
    depth: longest root-to-leaf path in edges, D <= block size - 1 and D < N.
    tree: name of the builder in ``sglang_jetspec.trees.TREE_BUILDERS``.
    block_size: rows of one draft pass, D + 1 (the anchor and D masks).
    """

    num_draft_tokens: int
    width: int
    depth: int
    tree: str

    @property
    def block_size(self) -> int:
        return self.depth + 1


def _decode(source: str, raw: Mapping[str, Any], kind: type[PartialOptions]) -> PartialOptions:
    try:
        return msgspec.convert(dict(raw), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise OptionError(f"{source}: {error}. Known keys: {known}.") from None


def read_environment(environ: Mapping[str, str] = os.environ) -> PartialOptions:
    """Options set by ``SGLANG_JETSPEC_*`` variables; an unknown one is refused."""
    raw = {
        name[len(ENVIRONMENT_PREFIX) :]: value
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    values = {name.lower(): v for name, v in raw.items() if name not in _OTHER_VARIABLES}
    return _decode(f"environment {ENVIRONMENT_PREFIX}*", values, PartialOptions)


def causality_override(environ: Mapping[str, str] = os.environ) -> bool | None:
    """``SGLANG_JETSPEC_CAUSAL`` (0 or 1): overrides what the checkpoint says of its causality."""
    value = environ.get(ENVIRONMENT_PREFIX + "CAUSAL")
    if value is None:
        return None
    if value not in ("0", "1"):
        raise OptionError(f"SGLANG_JETSPEC_CAUSAL={value!r}: use 0 or 1.")
    return value == "1"


def _named(name: str, value: Any) -> str:
    return f"{_FLAGS.get(name, name)}={value!r}"


def resolve_options(
    head: HeadConfig,
    *,
    on_cpu: bool,
    flags: PartialOptions | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Options:
    """Merge the sources for ``head`` and check the result.

    On a CPU a verified row costs real time, so the default budget is 8 nodes; on a GPU the
    verify pass of 64 nodes costs about as much as one of a single token.
    """
    block = _decode("the head's config.json, block jetspec", head.jetspec, HeadBlock)
    if head.token_input or head.draft_shift:
        raise OptionError(
            "jetspec.token_input or jetspec.draft_shift is true in the head's config.json: a "
            "JetSpec++ head, whose blocks hold tokens; the server drafts from masks. Serve a head "
            "trained without them."
        )
    sources = (flags or PartialOptions(), block, read_environment(environ))

    def first(name: str) -> Any:
        return next((v for s in sources if (v := getattr(s, name)) is not None), None)

    nodes = first("num_draft_tokens")
    width, depth, tree = first("width"), first("depth"), first("tree")
    longest = head.block_size - 1
    if nodes is None:
        nodes = min(8 if on_cpu else 64, 1 + longest if width == 1 else MAX_NODES)
    if not 2 <= nodes <= MAX_NODES:
        raise OptionError(
            f"{_named('num_draft_tokens', nodes)}: the tree budget counts the root, "
            f"use 2 to {MAX_NODES}."
        )
    if depth is None:
        depth = min(longest, nodes - 1)
    if not 1 <= depth <= longest:
        raise OptionError(
            f"{_named('depth', depth)}: the head drafts blocks of {head.block_size}, "
            f"use a depth of 1 to {longest}."
        )
    depth = min(depth, nodes - 1)
    if width is None:
        width = (4 if on_cpu else 7) if head.causal else 1
    vocabulary = head.draft_vocab_size or head.vocab_size
    if width < 1 or (vocabulary is not None and width > vocabulary):
        raise OptionError(f"{_named('width', width)}: use 1 to the draft vocabulary's size.")
    if width > 1 and not head.causal:
        raise OptionError(
            f"{_named('width', width)}: this head drafts its block bidirectionally "
            "(dflash_config.causal_head is not true), so the branches of a tree would not be "
            "consistent. Use --speculative-eagle-topk 1, or SGLANG_JETSPEC_CAUSAL=1 if the "
            "checkpoint was trained causally."
        )
    nodes = min(nodes, max_nodes(width, depth))
    if (tree := tree or "best_first") not in TREE_BUILDERS:
        raise OptionError(f"tree={tree!r}: use one of {', '.join(sorted(TREE_BUILDERS))}.")
    return Options(num_draft_tokens=nodes, width=width, depth=depth, tree=tree)
