"""Draft trees: construction from a head's per-depth candidates. Plain torch, no SGLang."""

from sglang_jetspec.trees.algorithm1 import (
    Algorithm1,
    DepthRankProfile,
    TopGap,
    algorithm1_tree,
)
from sglang_jetspec.trees.best_first import BestFirst, Chain, DDTree, best_first_tree
from sglang_jetspec.trees.builder import TreeBuilder, tree_builder
from sglang_jetspec.trees.draft_tree import DraftTree, LinkedTree, max_nodes
from sglang_jetspec.trees.scored import Entropy, Hybrid
from sglang_jetspec.trees.search import search_tree

TREE_BUILDERS: dict[str, type[TreeBuilder]] = {
    "best_first": BestFirst,
    "algorithm1": Algorithm1,
    "entropy": Entropy,
    "hybrid": Hybrid,
    "top2gap": TopGap,
    "profile": DepthRankProfile,
    "ddtree": DDTree,
    "chain": Chain,
}

__all__ = [
    "TREE_BUILDERS",
    "BestFirst",
    "DraftTree",
    "LinkedTree",
    "TreeBuilder",
    "algorithm1_tree",
    "best_first_tree",
    "max_nodes",
    "search_tree",
    "tree_builder",
]
