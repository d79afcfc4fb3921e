"""Draft trees: construction from a head's per-depth candidates. Plain torch, no SGLang."""

from collections.abc import Callable

from sglang_jetspec.trees.algorithm1 import algorithm1_tree
from sglang_jetspec.trees.best_first import best_first_tree
from sglang_jetspec.trees.draft_tree import DraftTree, max_nodes

TREE_BUILDERS: dict[str, Callable[..., DraftTree]] = {
    "best_first": best_first_tree,
    "algorithm1": algorithm1_tree,
}

__all__ = ["TREE_BUILDERS", "DraftTree", "algorithm1_tree", "best_first_tree", "max_nodes"]
