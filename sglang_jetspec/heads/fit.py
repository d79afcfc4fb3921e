"""Whether a head was made for a target."""

from __future__ import annotations

from collections.abc import Collection

from sglang_jetspec.heads.format import HeadConfig


def fit_problems(
    head: HeadConfig, hidden_size: int, num_layers: int, vocab_sizes: Collection[int]
) -> list[str]:
    """Why ``head`` cannot draft for a target of these sizes; empty if it can.

    vocab_sizes: sizes that name the target's vocabulary: the embedding's rows first, then the
    tokenizer's length (embeddings are often padded beyond it).
    """
    rows = max(vocab_sizes)
    problems = []
    if head.hidden_size != hidden_size:
        problems.append(f"hidden_size is {head.hidden_size}, the target's is {hidden_size}")
    if head.num_target_layers not in (None, num_layers):
        problems.append(f"num_target_layers is {head.num_target_layers}, the target's {num_layers}")
    if head.vocab_size is not None and head.vocab_size not in vocab_sizes:
        problems.append(f"vocab_size is {head.vocab_size}, the target's is {rows}")
    # States are captured on entry to layer l + 1: nothing is captured after the last layer.
    if max(head.target_layer_ids) >= num_layers - 1:
        problems.append(
            f"target_layer_ids is {list(head.target_layer_ids)}, the target's states are "
            f"captured up to layer {num_layers - 2}"
        )
    if head.mask_token_id >= rows:
        problems.append(f"mask_token_id is {head.mask_token_id}, the target has {rows} tokens")
    return problems
