"""Penalties at every tree node, as if the node's own path had been emitted.

Plain decoding changes a token's logit by what the output holds so far. At a node the output so far
is the committed one, root included, followed by the drafts from below the root down to the node
itself. The order and the formulas are SGLang's: frequency and presence are subtracted, then the
repetition penalty divides positive logits and multiplies negative ones.

Shapes: B requests, N tree nodes, D depth, V vocabulary, S stop tokens, C output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree


@dataclass(frozen=True)
class Penalties:
    """What each request asks, and the output it is asked for."""

    frequency: Tensor  # [B] fp32, 0 is neutral
    presence: Tensor  # [B] fp32, 0 is neutral
    repetition: Tensor  # [B] fp32, 1 is neutral
    counts: Tensor  # [B, V] fp32, how often the committed output holds each token

    def additive(self, counts: Tensor) -> Tensor:
        """What to add to the logits of tokens that occurred `counts` [B, ...] times."""
        shape = (-1, *[1] * (counts.dim() - 1))
        seen = (counts > 0).float()
        return -(self.frequency.view(shape) * counts) - self.presence.view(shape) * seen

    def scaling(self, counts: Tensor) -> Tensor:
        """The repetition penalty of tokens that occurred `counts` [B, ...] times."""
        shape = (-1, *[1] * (counts.dim() - 1))
        return torch.where(counts > 0, self.repetition.view(shape), 1.0)


def count_tokens(tokens: Tensor, lengths: Tensor, vocab: int) -> Tensor:
    """Occurrences of each token among the first `lengths` [B] of [B, C] `tokens`: [B, V] fp32."""
    inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
    counts = torch.zeros(len(tokens), vocab, device=tokens.device)
    return counts.scatter_add_(1, tokens.long(), inside.float())


def path_tokens(tree: DraftTree, max_depth: int) -> Tensor:
    """The drafts on each node's path, its own last: [B, N, D] int64, then -1."""
    batch, nodes = tree.tokens.shape
    on_path = tree.ancestors & (tree.depths > 0).unsqueeze(1)
    spot = torch.where(on_path, tree.depths.unsqueeze(1) - 1, max_depth)
    tokens = tree.tokens.new_full((batch, nodes, max_depth + 1), -1)
    tokens.scatter_(2, spot, tree.tokens.unsqueeze(1).expand(-1, nodes, -1))
    return tokens[:, :, :-1]  # the last column took what is not on the path


def penalize(logits: Tensor, tree: DraftTree, penalties: Penalties, max_depth: int) -> None:
    """Applies the penalties at every node, in place, without reading a value to the host.

    Args:
        logits: [B, N, V], any float type.
        tree: B trees; the root's token is part of `penalties.counts`.
        penalties: of the B requests; neutral ones leave their logits as they are.
        max_depth: D, no node is deeper.
    """
    paths = path_tokens(tree, max_depth)
    # Padding stands for token 0: it gets token 0's own value, so that every write is right.
    touched = paths.clamp(min=0)
    repeats = (touched.unsqueeze(3) == paths.unsqueeze(2)).sum(3)
    counts = penalties.counts.gather(1, touched.flatten(1)).view_as(touched) + repeats
    values = logits.gather(2, touched).float() + penalties.additive(counts)
    values = _scale(values, penalties.scaling(counts))

    # The committed output is the same at all nodes; a request at a time bounds the workspace.
    additive = penalties.additive(penalties.counts)
    scaling = penalties.scaling(penalties.counts)
    for request in range(len(logits)):
        rows = logits[request]
        rows.copy_(_scale(rows + additive[request], scaling[request]))
    logits.scatter_(2, touched, values.to(logits.dtype))


def _scale(logits: Tensor, scaling: Tensor) -> Tensor:
    return torch.where(logits < 0, logits * scaling, logits / scaling)


def ban_early_stops(logits: Tensor, depths: Tensor, stops: Tensor, missing: Tensor) -> None:
    """Bans the stop tokens where the output would end short of its minimum, in place.

    Args:
        logits: [B, N, V].
        depths: [B, N] int64; the choice at a node follows that many uncommitted tokens.
        stops: [B, S] int64, a request's stop tokens, repeated to fill the row.
        missing: [B] int64, tokens the committed output still lacks; none at 0 and below.
    """
    early = depths < missing.unsqueeze(1)
    bias = torch.zeros(early.shape, dtype=logits.dtype, device=logits.device)
    bias.masked_fill_(early, float("-inf"))
    shape = (*early.shape, stops.shape[1])
    logits.scatter_add_(2, stops.unsqueeze(1).expand(shape), bias.unsqueeze(2).expand(shape))
