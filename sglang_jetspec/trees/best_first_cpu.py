"""`best_first_tree` for CPUs: the heap, compiled.

The heap holds one entry a tree node: its best child that is not in the tree yet, as an int64 key of
cost (minus the path's log-probability, whose bits order as integers), depth and parent. Taking an
entry puts the parent's next child in its place, so that a node costs one sift down and one push.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree, check_drafts

Array = npt.NDArray[np.generic]
INFINITE = 0x7F800000  # bits of the float infinity
MAX_NODES = 1 << 16  # a key's share for the parent, and for the depth


def _rank(steps: Array, tokens: Array, ranked: Array, picked: Array) -> None:
    """Each row of steps [D, W] and its tokens, best first, equals by column."""
    depth, width = steps.shape
    for row in range(depth):
        for column in range(width):
            at = column
            while at > 0 and ranked[row, at - 1] < steps[row, column]:
                ranked[row, at] = ranked[row, at - 1]
                picked[row, at] = picked[row, at - 1]
                at -= 1
            ranked[row, at] = steps[row, column]
            picked[row, at] = tokens[row, column]


def _sift_down(heap: Array, size: int, key: int) -> None:
    """Puts key where the first of size entries was."""
    at = 0
    below = 1
    while below < size:
        if below + 1 < size and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= key:
            break
        heap[at] = heap[below]
        at = below
        below = 2 * at + 1
    heap[at] = key


def _push(heap: Array, size: int, key: int) -> None:
    """Adds key to size entries."""
    at = size
    while at > 0 and heap[(at - 1) >> 1] > key:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = key


def _build_one(
    ranked: Array,
    picked: Array,
    deepest: int,
    tokens: Array,
    parents: Array,
    depths: Array,
    scores: Array,
    live: Array,
    heap: Array,
    column: Array,
    cost: Array,
    bits: Array,
) -> None:
    """Fills the rows of one request's tree; its nodes below the root are dead before."""
    width = ranked.shape[1]
    size = 0
    for node in range(len(tokens)):
        entry = node
        if node > 0:
            if size == 0:
                return
            entry = heap[0] & (MAX_NODES - 1)
            level, pick = depths[entry], column[entry]
            tokens[node] = picked[level, pick]
            parents[node] = entry
            depths[node] = level + 1
            scores[node] = scores[entry] + ranked[level, pick]
            live[node] = True
            column[entry] += 1
        # The parent offers its next child in place of the one taken, the node its first.
        column[node] = 0
        while True:
            level = depths[entry]
            offered = False
            if level < deepest and column[entry] < width:
                cost[0] = -(scores[entry] + ranked[level, column[entry]])
                if cost[0] <= 0.0:  # minus zero, or rounded past it
                    cost[0] = 0.0
                offered = 0 <= bits[0] < INFINITE
            key = np.int64(bits[0]) << 32 | level << 16 | entry
            if entry == node:
                if offered:
                    push(heap, size, key)
                    size += 1
                break
            if not offered:
                size -= 1
                key = heap[size]
            sift_down(heap, size, key)
            entry = node


def _build(
    top_tokens: Array,
    steps: Array,
    depth_limit: Array,
    tokens: Array,
    parents: Array,
    depths: Array,
    scores: Array,
    live: Array,
    ancestors: Array,
) -> None:
    """Fills the trees of a batch; everything but their roots is dead before."""
    batch, nodes = tokens.shape
    depth, width = steps.shape[1:]
    ranked = np.empty((depth, width), np.float32)
    picked = np.empty((depth, width), np.int64)
    heap = np.empty(nodes + 1, np.int64)
    column = np.empty(nodes, np.int64)
    cost = np.empty(1, np.float32)
    bits = cost.view(np.int32)
    for b in range(batch):
        rank(steps[b], top_tokens[b], ranked, picked)
        build_one(
            ranked,
            picked,
            min(depth, depth_limit[b]),
            tokens[b],
            parents[b],
            depths[b],
            scores[b],
            live[b],
            heap,
            column,
            cost,
            bits,
        )
        for node in range(nodes):
            ancestors[b, node, node] = True
            at = node if live[b, node] else 0
            while at > 0:
                at = parents[b, at]
                ancestors[b, node, at] = True


rank, sift_down, push = (
    njit(cache=True)(_rank),
    njit(cache=True)(_sift_down),
    njit(cache=True)(_push),
)
build_one = njit(cache=True)(_build_one)
build = njit(
    "(i8[:,:,::1], f4[:,:,::1], i8[::1], i8[:,::1], i8[:,::1], i8[:,::1], f4[:,::1], b1[:,::1], "
    "b1[:,:,::1])",
    cache=True,
)(_build)


def best_first_tree_cpu(
    roots: Tensor,
    top_tokens: Tensor,
    top_logprobs: Tensor,
    nodes: int,
    depth_limit: Tensor | None = None,
) -> DraftTree:
    """As `best_first_tree`, bit for bit where columns are ranked; all tensors on the CPU.

    Where a row's columns are not ranked, equal sums of unequal steps may fall the other way.
    """
    batch, depth, _ = check_drafts(roots, top_tokens, top_logprobs, nodes)
    if nodes > MAX_NODES or depth >= MAX_NODES:
        raise ValueError(f"nodes = {nodes}, depth = {depth}: at most {MAX_NODES} and one less")
    tree = DraftTree(
        tokens=roots.new_zeros(batch, nodes),
        parents=roots.new_zeros(batch, nodes),
        depths=roots.new_zeros(batch, nodes),
        logprobs=torch.full((batch, nodes), float("-inf")),
        live=torch.zeros(batch, nodes, dtype=torch.bool),
        ancestors=torch.zeros(batch, nodes, nodes, dtype=torch.bool),
    )
    tree.tokens[:, 0] = roots
    tree.parents[:, 0] = -1
    tree.logprobs[:, 0] = 0.0
    tree.live[:, 0] = True
    limit = torch.full((batch,), depth) if depth_limit is None else depth_limit
    inputs = (top_tokens, top_logprobs.float(), limit)
    outputs = (tree.tokens, tree.parents, tree.depths, tree.logprobs, tree.live, tree.ancestors)
    build(*(t.detach().contiguous().numpy() for t in (*inputs, *outputs)))
    return tree
