"""The best N-node trees of a batch in one launch, one program a request, no host sync.

A program pops nodes best first. Its frontier is the table of all children of the nodes popped so
far, each an int64 key: cost (minus the path's log-probability, as the bits of a float >= 0, which
order as integers), then depth, parent, column. The smallest key is the next node, ties included:
the order of `trees.best_first`. A popped node's children cost at least what it costs, so the keys
come out in order and the first N are the best N.

B requests, N tree nodes (root included), D depth, W width, G = ceil(N / 32) mask words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_jetspec.trees.bitmask import mask_words
from sglang_jetspec.trees.draft_tree import LinkedTree, check_drafts

MAX_NODES = 1024  # ten bits of a key
MAX_WIDTH = 4096  # twelve bits
COLUMNS = tl.constexpr(8)
TAKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
DEAD = tl.constexpr(0x7F800000 << 32)  # keys of infinite cost start here


@triton.jit
def _pop_all(logprobs, depth_limit, pops, D, W, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr):
    """Keys of the nodes in tree order [BLOCK_N] int64; the root's is 0, unused ones are TAKEN."""
    index = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_W)
    keys = tl.where(index == 0, 0, tl.full((BLOCK_N,), TAKEN, tl.int64))
    frontier = tl.full((BLOCK_N, BLOCK_W), TAKEN, tl.int64)
    key = tl.zeros((), tl.int64)
    for node in range(pops):
        if node > 0:
            key = tl.min(tl.min(frontier, 1), 0)
            frontier = tl.where(frontier == key, TAKEN, frontier)
            keys = tl.where(index == node, key, keys)
        # The node's children join the frontier.
        score = 0.0 - (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        depth = ((key >> 22) & 0x3FF).to(tl.int32)
        allowed = (column < W) & (depth < depth_limit) & (key < DEAD)
        step = tl.load(
            logprobs + tl.minimum(depth, D - 1) * W + column,
            mask=allowed,
            other=float("-inf"),
        ).to(tl.float32)
        # Log-probabilities rounded above 0 would come before their parents; NaN is no candidate.
        step = tl.where(step > 0.0, 0.0, tl.where(step == step, step, float("-inf")))
        cost = (0.0 - (score + step)).to(tl.int32, bitcast=True).to(tl.int64)
        rest = (depth + 1).to(tl.int64) << 22 | (node << 12) | column.to(tl.int64)
        children = tl.where(allowed, (cost << 32) | rest, TAKEN)
        frontier = tl.where(index[:, None] == node, children[None, :], frontier)
    return keys


@triton.jit
def _ancestor_words(up, depth, BLOCK_N: tl.constexpr):
    """[BLOCK_N, BLOCK_N / 32] int32, by climbing from all nodes at once.

    up: [BLOCK_N] int32 parents; the root and dead nodes name themselves.
    """
    word = tl.arange(0, BLOCK_N // 32)[None, :]
    node = tl.arange(0, BLOCK_N)
    words = tl.where((node >> 5)[:, None] == word, (1 << (node & 31))[:, None], 0)
    for _ in range(depth):
        node = tl.gather(up, node, 0)
        words |= tl.where((node >> 5)[:, None] == word, (1 << (node & 31))[:, None], 0)
    return words


@triton.jit
def _tree_build(
    roots,
    top_tokens,
    top_logprobs,
    depth_limits,
    node_limits,
    tokens_out,
    parents_out,
    depths_out,
    logprobs_out,
    live_out,
    ancestors_out,
    words_out,
    child_out,
    sibling_out,
    N,
    D,
    W,
    G,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_DEPTH_LIMITS: tl.constexpr,
    HAS_NODE_LIMITS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    drafts = request * D * W
    index = tl.arange(0, BLOCK_N)
    deepest = D
    if HAS_DEPTH_LIMITS:
        deepest = tl.minimum(D, tl.load(depth_limits + request)).to(tl.int32)
    pops = N
    if HAS_NODE_LIMITS:
        pops = tl.minimum(N, tl.load(node_limits + request)).to(tl.int32)
    keys = _pop_all(top_logprobs + drafts, deepest, pops, D, W, BLOCK_N, BLOCK_W)

    live = keys < DEAD
    drafted = live & (index > 0)
    depth = tl.where(live, (keys >> 22) & 0x3FF, 0).to(tl.int32)
    parent = tl.where(live, (keys >> 12) & 0x3FF, 0).to(tl.int32)
    score = 0.0 - (keys >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    picked = drafts + (depth - 1) * W + (keys & 0xFFF)
    token = tl.load(top_tokens + picked, mask=drafted, other=0)
    token = tl.where(index == 0, tl.load(roots + request), token)

    at = request * N + index
    inside = index < N
    tl.store(tokens_out + at, token, mask=inside)
    tl.store(parents_out + at, tl.where(index == 0, -1, parent).to(tl.int64), mask=inside)
    tl.store(depths_out + at, depth.to(tl.int64), mask=inside)
    tl.store(logprobs_out + at, tl.where(live, score, float("-inf")), mask=inside)
    tl.store(live_out + at, live.to(tl.int8), mask=inside)

    words = _ancestor_words(tl.where(live, parent, index), tl.minimum(D, N), BLOCK_N)
    word = tl.arange(0, BLOCK_N // 32)[None, :]
    tl.store(words_out + at[:, None] * G + word, words, mask=inside[:, None] & (word < G))

    link = tl.where(drafted, parent, -1)
    child = tl.full((BLOCK_N,), BLOCK_N, tl.int32)
    sibling = tl.full((BLOCK_N,), BLOCK_N, tl.int32)
    rows_out = ancestors_out + request * N * N + index[:, None] * N
    # A few columns at a time: wider tiles spill registers.
    for first in range(0, BLOCK_N, COLUMNS):
        other = first + tl.arange(0, COLUMNS)
        bits = tl.sum(tl.where(word == first // 32, words, 0), 1)
        sees = (bits[:, None] >> (other % 32)[None, :]) & 1
        wanted = inside[:, None] & (other < N)[None, :]
        tl.store(rows_out + other[None, :], sees.to(tl.int8), mask=wanted)
        other_link = tl.gather(link, other, 0)[None, :]
        found = tl.where(other_link == index[:, None], other[None, :], BLOCK_N)
        child = tl.minimum(child, tl.min(found, 1))
        later = (other_link == link[:, None]) & (link >= 0)[:, None]
        later &= other[None, :] > index[:, None]
        sibling = tl.minimum(sibling, tl.min(tl.where(later, other[None, :], BLOCK_N), 1))
    tl.store(child_out + at, tl.where(child < BLOCK_N, child, -1).to(tl.int64), mask=inside)
    tl.store(sibling_out + at, tl.where(sibling < BLOCK_N, sibling, -1).to(tl.int64), mask=inside)


def tree_build(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
    node_limit: Tensor | None = None,
) -> LinkedTree:
    """`best_first_tree`, cut by `shrink`, with its links and packed ancestors.

    Args:
        roots: [B] int64. top_tokens: [B, D, W] int64. top_logprobs: [B, D, W] fp32, <= 0.
        nodes: N, at most 1024.
        depth_limit: [B] int64, deeper nodes stay dead; None: no limit below D.
        node_limit: [B] int64 >= 1, nodes a request can hold; None: N.

    Raises:
        ValueError: shapes disagree, or N, D or W are too large for a key.
    """
    batch, depth, width = check_drafts(roots, top_tokens, top_logprobs, nodes)
    if nodes > MAX_NODES or depth >= MAX_NODES or width > MAX_WIDTH:
        raise ValueError(
            f"nodes = {nodes}, depth = {depth}, width = {width}: at most {MAX_NODES} nodes, "
            f"{MAX_NODES - 1} levels and {MAX_WIDTH} columns"
        )

    def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(batch, nodes, *shape, dtype=dtype, device=roots.device)

    words = mask_words(nodes)
    tree = LinkedTree(
        tokens=table(),
        parents=table(),
        depths=table(),
        logprobs=table(dtype=torch.float32),
        live=table(dtype=torch.bool),
        ancestors=table(nodes, dtype=torch.bool),
        words=table(words, dtype=torch.int32),
        first_child=table(),
        next_sibling=table(),
    )
    block_n = max(32, triton.next_power_of_2(nodes))
    block_w = triton.next_power_of_2(width)
    _tree_build[(batch,)](
        roots.contiguous(),  # a round's are a column of its blocks
        top_tokens.contiguous(),
        top_logprobs.contiguous(),
        depth_limit if depth_limit is None else depth_limit.contiguous(),
        node_limit if node_limit is None else node_limit.contiguous(),
        tree.tokens,
        tree.parents,
        tree.depths,
        tree.logprobs,
        tree.live.view(torch.int8),
        tree.ancestors.view(torch.int8),
        tree.words,
        tree.first_child,
        tree.next_sibling,
        nodes,
        depth,
        width,
        words,
        BLOCK_N=block_n,
        BLOCK_W=block_w,
        HAS_DEPTH_LIMITS=depth_limit is not None,
        HAS_NODE_LIMITS=node_limit is not None,
        num_warps=warps(block_n * block_w),
    )
    return tree


def warps(cells: int) -> int:
    """Warps that hold a frontier of that many keys: one where it does, else 8 keys a thread."""
    return 1 if cells <= 512 else min(max(triton.next_power_of_2(cells // 256), 1), 8)
