"""The token tree one round proposes, in the flat form every later step reads.

Shapes: B requests, N tree nodes (root included), D depth, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class DraftTree:
    """A batch of token trees; node 0 is the root, parents come before children.

    The root holds the last committed token, whose KV the verify pass is about to write. Siblings
    never share a token. Where a request's tree has fewer than N nodes the rest are dead: they have
    token 0, parent 0, depth 0 (so that their position is a legal one), log-probability -inf, see
    only themselves, and are never accepted.
    """

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64, -1 at the root
    depths: Tensor  # [B, N] int64, 0 at the root
    logprobs: Tensor  # [B, N] fp32, the head's log-probability of the path from the root
    live: Tensor  # [B, N] bool
    ancestors: Tensor  # [B, N, N] bool; [b, i, j]: node i attends to node j (ancestors and itself)


@dataclass(frozen=True)
class LinkedTree(DraftTree):
    """A tree with what device kernels read. G = ceil(N / 32) words."""

    words: Tensor  # [B, N, G] int32, `ancestors` packed: see `trees.bitmask`
    first_child: Tensor  # [B, N] int64, -1 where none; children come in node order
    next_sibling: Tensor  # [B, N] int64, -1 where none


def max_nodes(width: int, depth: int, cap: int = 1 << 16) -> int:
    """Nodes of the full tree, root included: 1 + W + W^2 + ... + W^D, at most `cap`."""
    total, level = 1, 1
    for _ in range(depth):
        level *= width
        total += level
        if total >= cap:
            return cap
    return total


def ancestor_matrix(parents: Tensor, live: Tensor, max_depth: int) -> Tensor:
    """Transitive closure of the parent links, by repeated squaring.

    Args:
        parents: [B, N] int64; what dead nodes and the root (-1) hold is not followed.
        live: [B, N] bool.
        max_depth: no live node is deeper.

    Returns:
        [B, N, N] bool, each node's ancestors and the node itself.
    """
    nodes = parents.shape[1]
    index = torch.arange(nodes, device=parents.device)
    links = (parents.unsqueeze(2) == index) & live.unsqueeze(2)
    reach = (links | (index.unsqueeze(1) == index)).float()
    for _ in range(max(max_depth - 1, 0).bit_length()):
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
    return reach > 0.5


def check_drafts(
    roots: Tensor, top_tokens: Tensor, top_logprobs: Tensor, nodes: int
) -> tuple[int, int, int]:
    """Returns (B, D, W) of a builder's input; raises ValueError where the shapes disagree."""
    if top_tokens.dim() != 3 or top_tokens.shape != top_logprobs.shape:
        raise ValueError(
            f"top_tokens {tuple(top_tokens.shape)} and top_logprobs {tuple(top_logprobs.shape)} "
            "must both be [B, D, W]"
        )
    if 0 in top_tokens.shape:
        raise ValueError(
            f"top_tokens {tuple(top_tokens.shape)}: B, D and W must be at least 1; "
            "limit a request to its root with depth_limit = 0"
        )
    if roots.shape != top_tokens.shape[:1]:
        raise ValueError(
            f"roots {tuple(roots.shape)} must be [B] with B = {top_tokens.shape[0]}, "
            "one root token per request"
        )
    if nodes < 1:
        raise ValueError(f"nodes = {nodes}: a tree needs its root, use at least 1")
    batch, depth, width = top_tokens.shape
    return batch, depth, width


def limit_depth(top_logprobs: Tensor, depth_limit: Tensor | None) -> Tensor:
    """fp32 [B, D, W] log-probabilities, -inf at depths a request's [B] limit does not allow."""
    scores = top_logprobs.float()
    if depth_limit is None:
        return scores
    depth = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    too_deep = depth > depth_limit.unsqueeze(1)
    return scores.masked_fill(too_deep.unsqueeze(2), float("-inf"))


def rooted_tree(
    roots: Tensor,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    logprobs: Tensor,
    max_depth: int,
) -> DraftTree:
    """Puts the [B] roots before the [B, N-1] drafts and blanks drafts of log-probability -inf."""
    live = pad(logprobs > float("-inf"), (1, 0), value=True)
    parents = pad(parents, (1, 0), value=-1) * live
    return DraftTree(
        tokens=torch.cat([roots.unsqueeze(1), tokens], 1) * live,
        parents=parents,
        depths=pad(depths, (1, 0)) * live,
        logprobs=pad(logprobs, (1, 0)),
        live=live,
        ancestors=ancestor_matrix(parents, live, max_depth),
    )
