"""The JetSpec paper's Algorithm 1 (pop the best node, append all of its children, repeat), and its
fan-out variants, which append fewer children at some depths.

Kept for comparison. Appending whole families spends budget on low-ranked siblings, so at equal N
it accepts clearly less than `best_first_tree`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from sglang_jetspec.trees.best_first import best_first_tree
from sglang_jetspec.trees.builder import Drafts, TreeBuilder
from sglang_jetspec.trees.draft_tree import DraftTree, check_drafts, limit_depth, rooted_tree


def algorithm1_tree(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
    fan_out: Tensor | None = None,
) -> DraftTree:
    """Best-first expansion a whole family at a time, until N nodes exist or none can be expanded.

    Nodes are in the order they were appended. Pops follow the cumulative log-probability, so that
    the popped nodes are the first ones of the best-first tree above the deepest level (among equal
    scores the shallower first, then the older); their families in that order are the answer. No
    loop over nodes is needed, and no value is read back to the host.

    Args, returned trees and errors are those of `TreeBuilder`, and:
        fan_out: [B, D] int64, children appended at each depth, 1..W. None: W everywhere.
    """
    batch, depth, width = check_drafts(roots, top_tokens, top_logprobs, nodes)
    steps = limit_depth(top_logprobs, depth_limit)
    pops = nodes - 1
    if fan_out is None:
        pops = -(-pops // width)
        fan_out = roots.new_full((batch, depth), width)
    column = torch.arange(width, device=roots.device)
    allowed = column < fan_out.unsqueeze(2)
    steps = steps.masked_fill(~allowed, float("-inf"))
    limit = roots.new_full((batch,), depth) if depth_limit is None else depth_limit.clamp(max=depth)

    columns = column.expand(batch, depth, width)  # the popped nodes' tokens: their own columns
    popped = best_first_tree(roots, columns, steps, max(pops, 1), (limit - 1).clamp(min=0))
    family = fan_out.gather(1, popped.depths.clamp(max=depth - 1))
    family = family * (popped.live & (popped.depths < limit.unsqueeze(1)))
    ends = family.cumsum(1)
    first = ends - family + 1  # place of each family's first child in the answer

    place = torch.arange(1, nodes, device=roots.device).expand(batch, -1).contiguous()
    above = torch.searchsorted(ends, place)  # the popped node whose family holds the place
    exists = above < ends.shape[1]
    above = above.clamp(max=ends.shape[1] - 1)
    rank = (place - first.gather(1, above)).clamp(0, width - 1)
    row = popped.depths.gather(1, above) * width + rank  # in the flat [D * W] candidates
    row = row.clamp(max=depth * width - 1)
    score = popped.logprobs.gather(1, above) + steps.flatten(1).gather(1, row)
    # Where a popped node stands in the answer: in its parent's family, at its own column.
    home = first.gather(1, popped.parents.clamp(min=0)) + popped.tokens
    home[:, 0] = 0
    return rooted_tree(
        roots,
        tokens=top_tokens.flatten(1).gather(1, row),
        parents=home.gather(1, above),
        depths=popped.depths.gather(1, above) + 1,
        logprobs=score.masked_fill(~exists, float("-inf")),
        max_depth=min(depth, nodes - 1),
    )


class Algorithm1(TreeBuilder, frozen=True):
    """Whole families of W children."""

    def fan_out(self, top_logprobs: Tensor) -> Tensor | None:
        """[B, D] int64 children a node gets at each depth; None: W."""
        return None

    def build(self, drafts: Drafts, nodes: int) -> DraftTree:
        rows = (drafts.roots, drafts.tokens, drafts.logprobs)
        fan_out = self.fan_out(drafts.logprobs)
        return algorithm1_tree(*rows, nodes, drafts.depth_limit, fan_out)


class TopGap(Algorithm1, frozen=True):
    """Fewer children where the head is sure: W * sigmoid(-beta * (gap - center)), rounded, at least
    1, where gap is the difference of the two best log-probabilities of the row (JetSpec's public
    code, `top2gap_fanout`)."""

    beta: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    center: float = 1.0

    def fan_out(self, top_logprobs: Tensor) -> Tensor | None:
        width = top_logprobs.shape[2]
        if width < 2:
            return None
        gap = (top_logprobs[..., 0] - top_logprobs[..., 1]).float().nan_to_num()
        share = torch.sigmoid(-self.beta * (gap - self.center))
        return (width * share).round().clamp(1, width).long()


class DepthRankProfile(Algorithm1, frozen=True):
    """As many children at depth d as ranks r with rates[d-1][r] >= threshold, at least 1 and at
    most W; W below the last row (JetSpec's public code, `depth_rank_histogram`).

    rates: how often the target's choice at depth d had rank r among the head's candidates.
    """

    rates: list[list[Annotated[float, msgspec.Meta(ge=0, le=1)]]]
    threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.02

    def fan_out(self, top_logprobs: Tensor) -> Tensor | None:
        batch, depth, width = top_logprobs.shape
        counts = [sum(rate >= self.threshold for rate in row) for row in self.rates[:depth]]
        counts = [min(max(count, 1), width) for count in counts] + [width] * (depth - len(counts))
        return _on_device(tuple(counts), top_logprobs.device).expand(batch, -1)


@lru_cache(maxsize=64)
def _on_device(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device)
