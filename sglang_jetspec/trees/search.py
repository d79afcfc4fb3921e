"""The best N-node tree by cumulative log-probability, exactly, level by level.

No increment is positive, so a node never scores above its parent, the best N-1 nodes contain all
their ancestors, and at most N-d of them lie at depth d (each needs d-1 ancestors). Keeping the best
N-d of (kept parents x W) at each level and then the best N-1 over all levels is therefore exact:
the tree of DDTree's heap, without a heap. It holds as well where a node's children depend on the
path that leads to it, as in a lattice whose increments depend on the token before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree, rooted_tree

# (depth, kept parents) -> children's tokens and increments, [B, P, W] each (P may be 1: the same
# for all parents). `kept` [B, P] int64 tells each parent's place among its level's candidates
# (parent's place x W + column); None at depth 1, whose parent is the root.
Expand = Callable[[int, Tensor | None], tuple[Tensor, Tensor]]


@lru_cache(maxsize=64)
def level_sizes(nodes: int, depth: int, width: int) -> tuple[int, ...]:
    """How many nodes of each depth 1..D can be in the best tree."""
    sizes: list[int] = []
    parents = 1
    for level in range(min(depth, nodes - 1)):
        parents = min(parents * width, nodes - 1 - level)
        sizes.append(parents)
    return tuple(sizes)


@cache
def _candidate_index(
    sizes: tuple[int, ...], padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Constants per candidate [C]: its depth, and the number of the first candidate of its
    parents' level (the root is candidate 0, so level 1 starts at 1). Kept for good: captured graphs
    hold their addresses."""
    depth = torch.cat(
        [torch.full((size,), level + 1) for level, size in enumerate(sizes)]
        + [torch.zeros(padding, dtype=torch.int64)]
    )
    starts = [0, 0, 1]
    for size in sizes:
        starts.append(starts[-1] + size)
    return depth.to(device), torch.tensor(starts)[depth].to(device)


def search_tree(roots: Tensor, expand: Expand, depth: int, width: int, nodes: int) -> DraftTree:
    """The `nodes`-node tree with the highest total of cumulative log-probabilities.

    Nodes are ordered by falling score, ties by rising depth, then by the parent's order and the
    child's column. No value is read back to the host, so it runs asynchronously on a device.

    Args:
        roots: [B] int64, last committed token of each request.
        expand: children of the kept nodes of one level, see `Expand`; increments <= 0, -inf: never
            used; a node's children are distinct tokens.
        depth: D, levels of `expand`.
        width: W, children a node.
        nodes: budget N, root included.

    Returns:
        Trees of exactly N rows, the live ones first.
    """
    batch = len(roots)
    sizes = level_sizes(nodes, depth, width)
    padding = max(nodes - 1 - sum(sizes), 0)
    parent_scores = torch.zeros(batch, 1, device=roots.device)
    kept: Tensor | None = None
    scores, picks, tokens = [], [], []  # per level, [B, size] each
    for level, size in enumerate(sizes):
        children, steps = expand(level + 1, kept)
        candidates = (parent_scores.unsqueeze(2) + steps).flatten(1)
        ranked, order = candidates.sort(dim=1, descending=True, stable=True)
        parent_scores, kept = ranked[:, :size], order[:, :size]
        scores.append(parent_scores)
        picks.append(kept)
        place = kept if children.shape[1] > 1 else kept % width
        tokens.append(children.flatten(1).gather(1, place))
    if padding or not sizes:
        scores.append(parent_scores.new_full((batch, padding), float("-inf")))
        picks.append(roots.new_zeros(batch, padding))
        tokens.append(roots.new_zeros(batch, padding))

    ranked, order = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True)
    order = order[:, : nodes - 1]
    depth_of, first_parent = _candidate_index(sizes, padding, roots.device)
    # Where each candidate (root first) went in the output; a live node's parent is always placed.
    places = roots.new_zeros(batch, depth_of.shape[0] + 1)
    places.scatter_(1, order + 1, torch.arange(1, nodes, device=roots.device).expand(batch, -1))
    parent = first_parent[order] + torch.cat(picks, 1).gather(1, order) // width
    return rooted_tree(
        roots,
        tokens=torch.cat(tokens, 1).gather(1, order),
        parents=places.gather(1, parent),
        depths=depth_of[order],
        logprobs=ranked[:, : nodes - 1],
        max_depth=len(sizes),
    )
