"""The best N-node tree by cumulative log-probability, exactly, as one tensor program.

The head gives one distribution per depth, shared by all parents of that depth, and no increment
is positive. So a node never scores above its parent, the best N-1 nodes contain all their
ancestors, and at most N-d of them lie at depth d (each needs d-1 ancestors). Keeping the best N-d
of (kept parents x W) at each level and then the best N-1 over all levels is therefore exact: the
tree of DDTree's heap, without a heap.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree, check_drafts, limit_depth, rooted_tree


@lru_cache(maxsize=64)
def _level_sizes(nodes: int, depth: int, width: int) -> tuple[int, ...]:
    """How many nodes of each depth 1..D can be in the best tree."""
    sizes: list[int] = []
    parents = 1
    for level in range(min(depth, nodes - 1)):
        parents = min(parents * width, nodes - 1 - level)
        sizes.append(parents)
    return tuple(sizes)


@cache
def _candidate_index(
    sizes: tuple[int, ...], padding: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Constants per candidate [C]: its depth, its row in the flat [D*W] drafts, and the number of
    the first candidate of its parents' level (the root is candidate 0, so level 1 starts at 1).
    Kept for good: captured graphs hold their addresses."""
    depth = torch.cat(
        [torch.full((size,), level + 1) for level, size in enumerate(sizes)]
        + [torch.zeros(padding, dtype=torch.int64)]
    )
    starts = [0, 0, 1]
    for size in sizes:
        starts.append(starts[-1] + size)
    first = torch.tensor(starts)[depth]
    return depth.to(device), ((depth - 1).clamp(min=0) * width).to(device), first.to(device)


def best_first_tree(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
) -> DraftTree:
    """The `nodes`-node tree with the highest total of cumulative log-probabilities.

    Nodes are ordered by falling score, ties by rising depth, then by the parent's order and the
    child's column. No value is read back to the host, so it runs asynchronously on a device.

    Args:
        roots: [B] int64, last committed token of each request.
        top_tokens: [B, D, W] int64, distinct candidates for each depth.
        top_logprobs: [B, D, W] fp32, their log-probabilities (<= 0; -inf: never used).
        nodes: budget N, root included.
        depth_limit: [B] int64; deeper nodes stay dead. None: no limit below D.

    Returns:
        Trees of exactly N rows, the live ones first.

    Raises:
        ValueError: shapes disagree or nodes < 1.
    """
    batch, depth, width = check_drafts(roots, top_tokens, top_logprobs, nodes)
    steps = limit_depth(top_logprobs, depth_limit)
    sizes = _level_sizes(nodes, depth, width)
    padding = max(nodes - 1 - sum(sizes), 0)

    parent_scores = steps.new_zeros(batch, 1)
    scores, picks = (
        [],
        [],
    )  # per level: [B, size] score, and parent's place in its level * W + column
    for level, size in enumerate(sizes):
        candidates = (parent_scores.unsqueeze(2) + steps[:, level].unsqueeze(1)).flatten(1)
        ranked, pick = candidates.sort(dim=1, descending=True, stable=True)
        parent_scores = ranked[:, :size]
        scores.append(parent_scores)
        picks.append(pick[:, :size])
    if padding or not sizes:
        scores.append(steps.new_full((batch, padding), float("-inf")))
        picks.append(roots.new_zeros(batch, padding))

    ranked, order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
    order = order[:, : nodes - 1]
    pick = torch.cat(picks, 1).gather(1, order)
    depth_of, row_of, first_parent = _candidate_index(sizes, padding, width, roots.device)

    # Where each candidate (root first) went in the output; a live node's parent is always placed.
    places = roots.new_zeros(batch, depth_of.shape[0] + 1)
    places.scatter_(1, order + 1, torch.arange(1, nodes, device=roots.device).expand(batch, -1))
    return rooted_tree(
        roots,
        tokens=top_tokens.flatten(1).gather(1, row_of[order] + pick % width),
        parents=places.gather(1, first_parent[order] + pick // width),
        depths=depth_of[order],
        logprobs=ranked[:, : nodes - 1],
        max_depth=len(sizes),
    )
