"""What a request may ask of a JETSPEC server; the rest is refused with HTTP 400."""

from __future__ import annotations

from typing import Any

# Rows of a verify pass are tree nodes, not tokens in order, or come without hidden states.
UNSERVED = (
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
    "token_indices_to_pool",
    "multi_item_delimiter_indices",
)
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
# Their state can be rolled back, which a walk through a tree needs. With "none" SGLang refuses.
GRAMMAR_BACKENDS = ("xgrammar", "llguidance", "none")


def unserved(request: Any, grammar_backend: str) -> str | None:
    """The first feature of ``request`` (one GenerateReqInput) JETSPEC does not serve, or None."""
    for name in UNSERVED:
        if getattr(request, name):
            return name
    parameters = request.sampling_params or {}
    for name in GRAMMARS:
        if parameters.get(name) and grammar_backend not in GRAMMAR_BACKENDS:
            return f"{name} under --grammar-backend {grammar_backend}"
    return None


def refuse_unserved(manager: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Hook before SGLang's own request validation; ValueError becomes HTTP 400.

    An unserved feature that reached the scheduler would be ignored or would stop it.
    """
    from sglang.srt.runtime_context import get_exec, get_spec

    if get_spec().speculative_algorithm != "JETSPEC" or not hasattr(request, "return_logprob"):
        return
    feature = unserved(request, get_exec().kernel.grammar_backend)
    if feature is not None:
        raise ValueError(
            f"{feature} is not served with --speculative-algorithm JETSPEC; drop it from the "
            "request, or send the request to a server without speculation."
        )


def refuse_foreign_tokens(
    manager: Any, request: Any, input_ids: list[int] | None, *args: Any, **kwargs: Any
) -> None:
    """Hook before SGLang's own request validation: token ids outside the vocabulary.

    SGLang passes them on, and the embedding's look-up then ends the scheduler.
    """
    if not input_ids or isinstance(input_ids[0], list):
        return
    size = manager.model_config.vocab_size
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= size:
        raise ValueError(
            f"input_ids holds {lowest if lowest < 0 else highest}; the model's token ids are 0 to "
            f"{size - 1}."
        )
