"""The torch program `tree_build` must equal bit for bit."""

from __future__ import annotations

from torch import Tensor

from sglang_jetspec.trees.best_first import best_first_tree
from sglang_jetspec.trees.bitmask import pack_ancestors
from sglang_jetspec.trees.draft_tree import LinkedTree
from sglang_jetspec.trees.links import child_links
from sglang_jetspec.trees.shrink import shrink


def tree_build(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
    node_limit: Tensor | None = None,
) -> LinkedTree:
    """As the kernel's launcher."""
    tree = best_first_tree(roots, top_tokens, top_logprobs, nodes, depth_limit)
    if node_limit is not None:
        tree = shrink(tree, node_limit)
    child, sibling = child_links(tree)
    words = pack_ancestors(tree.ancestors)
    return LinkedTree(**vars(tree), words=words, first_child=child, next_sibling=sibling)
