"""Draft trees: construction from a head's per-depth candidates. Plain torch, no SGLang."""

from collections.abc import Callable

from torch import Tensor

from sglang_jetspec.trees.algorithm1 import algorithm1_tree
from sglang_jetspec.trees.best_first import best_first_tree
from sglang_jetspec.trees.draft_tree import DraftTree, LinkedTree, max_nodes


def best_first(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
) -> DraftTree:
    """`best_first_tree`, on a CPU by its compiled equal."""
    if top_logprobs.device.type != "cpu":
        return best_first_tree(roots, top_tokens, top_logprobs, nodes, depth_limit)
    # Compiles when first imported, which processes that build no trees are spared.
    from sglang_jetspec.trees.best_first_cpu import best_first_tree_cpu

    return best_first_tree_cpu(roots, top_tokens, top_logprobs, nodes, depth_limit)


TREE_BUILDERS: dict[str, Callable[..., DraftTree]] = {
    "best_first": best_first,
    "algorithm1": algorithm1_tree,
}

__all__ = [
    "TREE_BUILDERS",
    "DraftTree",
    "LinkedTree",
    "algorithm1_tree",
    "best_first_tree",
    "max_nodes",
]
