"""Trees ordered by scores other than the log-probability (JetSpec paper, ablation of scores).

A node's score is its parent's plus an increment that may be positive. A node can then score above
its parent, so that the N best nodes need not form a tree. What is built is what a heap gives: the
best node whose parent is in the tree, N-1 times.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from sglang_jetspec.trees.builder import Drafts, TreeBuilder
from sglang_jetspec.trees.draft_tree import DraftTree, check_drafts, limit_depth, rooted_tree


def scored_tree(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    increments: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
) -> DraftTree:
    """Pops the best offered node, N-1 times, each on all requests at once.

    A pop offers the node's first child and its next sibling. Among equal scores the one offered
    first wins, a child before a sibling. Nodes are in the order of the pops. No value is read back
    to the host.

    Args, returned trees and errors are those of `TreeBuilder`, and:
        increments: [B, D, W] fp32, not rising along the columns; -inf: never used.
    """
    batch, depth, width = check_drafts(roots, top_tokens, top_logprobs, nodes)
    steps = limit_depth(increments, depth_limit).flatten(1)
    steps = torch.cat([steps, steps.new_full((batch, 1), float("-inf"))], 1)  # a place past the end
    requests = torch.arange(batch, device=roots.device)
    offers = steps.new_full((batch, 2 * nodes), float("-inf"))  # scores
    rows, parents = (roots.new_zeros(batch, 2 * nodes) for _ in range(2))
    scores = steps.new_zeros(batch, nodes)
    row_of, parent_of = (roots.new_zeros(batch, nodes) for _ in range(2))
    offers[:, 0] = steps[:, 0]
    for node in range(1, nodes):
        score, pick = offers.max(1)
        row, parent = rows[requests, pick], parents[requests, pick]
        scores[:, node], row_of[:, node], parent_of[:, node] = score, row, parent
        offers[requests, pick] = float("-inf")
        child = ((row // width + 1) * width).clamp(max=depth * width)
        last = row % width == width - 1
        sibling = (row + 1).masked_fill(last, depth * width)
        slots = slice(2 * node, 2 * node + 2)
        rows[:, slots] = torch.stack([child, sibling], 1)
        parents[:, slots] = torch.stack([torch.full_like(parent, node), parent], 1)
        beside = torch.where(score > float("-inf"), scores[requests, parent], score)
        above = torch.stack([score, beside], 1)
        offers[:, slots] = above + steps.gather(1, rows[:, slots])
    row = row_of[:, 1:]
    live = scores[:, 1:] > float("-inf")
    tree = rooted_tree(
        roots,
        tokens=top_tokens.flatten(1).gather(1, row),
        parents=parent_of[:, 1:],
        depths=row // width + 1,
        logprobs=top_logprobs.float().flatten(1).gather(1, row).masked_fill(~live, float("-inf")),
        max_depth=min(depth, nodes - 1),
    )
    return _with_path_logprobs(tree)


def _with_path_logprobs(tree: DraftTree) -> DraftTree:
    """Each node's own log-probability replaced by its path's."""
    own = tree.logprobs.masked_fill(~tree.live, 0.0)
    total = (tree.ancestors * own.unsqueeze(1)).sum(2)
    return DraftTree(
        tree.tokens,
        tree.parents,
        tree.depths,
        total.masked_fill(~tree.live, float("-inf")),
        tree.live,
        tree.ancestors,
    )


class ScoredTree(TreeBuilder, frozen=True):
    """A kind whose scores need the rows' entropies."""

    needs_entropies: ClassVar[bool] = True

    @abstractmethod
    def increments(self, logprobs: Tensor, entropies: Tensor) -> Tensor:
        """See `scored_tree`. logprobs: [B, D, W] fp32. entropies: [B, D] fp32."""

    def build(self, drafts: Drafts, nodes: int) -> DraftTree:
        increments = self.increments(drafts.logprobs.float(), drafts.row_entropies())
        rows = (drafts.roots, drafts.tokens, drafts.logprobs)
        return scored_tree(*rows, increments, nodes, drafts.depth_limit)


class Hybrid(ScoredTree, frozen=True):
    """Increment log q + alpha * H, H the row's entropy: a positive alpha goes deeper where the head
    is unsure, a negative one avoids it, 0 is `best_first`."""

    alpha: float = 0.25

    def increments(self, logprobs: Tensor, entropies: Tensor) -> Tensor:
        return logprobs + self.alpha * entropies.unsqueeze(2)


class Entropy(ScoredTree, frozen=True):
    """Increment H alone, the limit of `Hybrid` for a large alpha; `sign` -1 prefers sure rows."""

    sign: int = 1

    def __post_init__(self) -> None:
        if self.sign not in (1, -1):
            raise ValueError(f"sign={self.sign}: use 1 or -1")

    def increments(self, logprobs: Tensor, entropies: Tensor) -> Tensor:
        impossible = logprobs == float("-inf")
        increments = (self.sign * entropies.unsqueeze(2)).expand_as(logprobs)
        return increments.masked_fill(impossible, float("-inf"))
