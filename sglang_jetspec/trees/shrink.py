"""Cutting a tree down to what a request can still hold."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree


def shrink(tree: DraftTree, limits: Tensor) -> DraftTree:
    """Keep each tree's first ``limits[b]`` nodes; the rest become dead.

    Parents come before children, so that what remains is a tree. limits: [B] int64, >= 1.
    """
    index = torch.arange(tree.tokens.shape[1], device=limits.device)
    live = tree.live & (index < limits.unsqueeze(1))
    itself = index.unsqueeze(1) == index
    return DraftTree(
        tokens=tree.tokens * live,
        parents=(tree.parents * live),
        depths=tree.depths * live,
        logprobs=tree.logprobs.masked_fill(~live, float("-inf")),
        live=live,
        ancestors=torch.where(live.unsqueeze(2), tree.ancestors, itself),
    )
