"""The tree as first-child and next-sibling links, the form SGLang's grammar traversal reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree, LinkedTree


def child_links(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """The first child and the next sibling of every node: two [B, N] int64, -1 where none.

    Children come in node order. Dead nodes are nobody's child and have no links.
    """
    if isinstance(tree, LinkedTree):
        return tree.first_child, tree.next_sibling
    index = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    drafts = tree.live & (index > 0)
    parents = tree.parents.masked_fill(~drafts, -2)  # never equal to a node
    child = parents.unsqueeze(1) == index.unsqueeze(1)
    later = index > index.unsqueeze(1)
    sibling = (parents.unsqueeze(1) == parents.unsqueeze(2)) & later & drafts.unsqueeze(2)
    return _first(child), _first(sibling)


def _first(matrix: Tensor) -> Tensor:
    """The first true column of each row of [B, N, N], -1 where none is."""
    found, column = matrix.max(2)
    return column.masked_fill(~found, -1)
