"""What a request may ask of a JETSPEC server; the rest is refused with HTTP 400."""

from __future__ import annotations

from typing import Any

_UNSET = ("regex", "json_schema", "ebnf", "structural_tag", "sampling_seed")


def unserved(request: Any) -> str | None:
    """The first feature of ``request`` (one GenerateReqInput) JETSPEC does not serve, or None."""
    if request.return_logprob:
        return "return_logprob"
    if request.return_hidden_states:
        return "return_hidden_states"
    if request.return_sampling_mask:
        return "return_sampling_mask"
    if request.custom_logit_processor is not None:
        return "custom_logit_processor"
    parameters = request.sampling_params or {}
    for name in _UNSET:
        if parameters.get(name):
            return name
    return None


def refuse_unserved(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Hook before SGLang's own request validation; ValueError becomes HTTP 400.

    An unserved feature that reached the scheduler would be ignored or would stop it.
    """
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm != "JETSPEC" or not hasattr(request, "return_logprob"):
        return
    feature = unserved(request)
    if feature is not None:
        raise ValueError(
            f"{feature} is not served with --speculative-algorithm JETSPEC; drop it from the "
            "request, or send the request to a server without speculation."
        )
