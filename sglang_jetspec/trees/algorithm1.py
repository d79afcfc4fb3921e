"""The JetSpec paper's Algorithm 1: pop the best node, append all of its W children, repeat.

Kept for comparison. It spends budget on low-ranked siblings of popped nodes, so at equal N it
accepts clearly less than `best_first_tree`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree, check_drafts, limit_depth, rooted_tree


def algorithm1_tree(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
) -> DraftTree:
    """Best-first expansion W children at a time, until N nodes exist or none can be expanded.

    Nodes are in the order they were appended; among equal scores the oldest is popped first. A
    node at the depth limit has no children and is never popped, which changes no tree. Candidates
    of log-probability -inf are appended like others and are dead. The loop runs over pops only and
    no value is read back to the host.

    Args, returned trees and errors are those of `best_first_tree`; `top_tokens` columns are ranked,
    best first.
    """
    batch, depth, width = check_drafts(roots, top_tokens, top_logprobs, nodes)
    steps = limit_depth(top_logprobs, depth_limit)
    rows = torch.arange(batch, device=roots.device)

    scores = steps.new_full((batch, nodes), float("-inf"))
    scores[:, 0] = 0.0
    frontier = scores.clone()  # scores of nodes that can still be popped
    tokens, parents, depths = (roots.new_zeros(batch, nodes) for _ in range(3))
    deepest = roots.new_full((batch,), depth)
    if depth_limit is not None:
        deepest = torch.minimum(deepest, depth_limit)
    for first in range(1, nodes, width):
        last = min(first + width, nodes)
        score, popped = frontier.max(dim=1)
        frontier[rows, popped] = float("-inf")
        level = depths[rows, popped]  # the children's row of the drafts

        children = score.unsqueeze(1) + steps[rows, level][:, : last - first]
        scores[:, first:last] = children
        tokens[:, first:last] = top_tokens[rows, level][:, : last - first]
        parents[:, first:last] = popped.unsqueeze(1)
        depths[:, first:last] = level.unsqueeze(1) + 1
        is_leaf = (level + 1 >= deepest).unsqueeze(1)
        frontier[:, first:last] = children.masked_fill(is_leaf, float("-inf"))
    return rooted_tree(
        roots, tokens[:, 1:], parents[:, 1:], depths[:, 1:], scores[:, 1:], min(depth, nodes - 1)
    )
