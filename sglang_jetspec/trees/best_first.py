"""Exact top-B over rows that are the same for all parents of a depth (the default), and a chain."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sglang_jetspec.trees.builder import Drafts, TreeBuilder
from sglang_jetspec.trees.draft_tree import DraftTree, check_drafts, limit_depth
from sglang_jetspec.trees.search import search_tree


def best_first_tree(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
) -> DraftTree:
    """`search_tree` over a head's rows; `top_logprobs` <= 0, columns in any order.

    Arguments are those of `TreeBuilder`.
    """
    _, depth, width = check_drafts(roots, top_tokens, top_logprobs, nodes)
    steps = limit_depth(top_logprobs, depth_limit)

    def expand(level: int, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        row = slice(level - 1, level)
        return top_tokens[:, row], steps[:, row]

    return search_tree(roots, expand, depth, width, nodes)


class BestFirst(TreeBuilder, frozen=True):
    """The N nodes of highest cumulative log-probability; on a CPU by a compiled heap."""

    def build(self, drafts: Drafts, nodes: int) -> DraftTree:
        rows = (drafts.roots, drafts.tokens, drafts.logprobs)
        if drafts.logprobs.device.type != "cpu":
            return best_first_tree(*rows, nodes, drafts.depth_limit)
        # Compiles when first imported, which processes that build no trees are spared.
        from sglang_jetspec.trees.best_first_cpu import best_first_tree_cpu

        return best_first_tree_cpu(*rows, nodes, drafts.depth_limit)


class DDTree(BestFirst, frozen=True):
    """`BestFirst` over a bidirectional head's rows, as DDTree drafts from a DFlash head."""

    any_head: ClassVar[bool] = True


class Chain(BestFirst, frozen=True):
    """The likeliest token at every depth."""

    any_head: ClassVar[bool] = True
    max_width: ClassVar[int | None] = 1
