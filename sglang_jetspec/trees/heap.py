"""The tree builders as textbook heap loops, one request at a time.

Readable references and test oracles; the server uses the batched builders.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

Rows = Sequence[Sequence[float]]  # [D, W] log-probabilities of the candidates of each depth


class HeapNode(NamedTuple):
    """`columns` names the node: the column of its token in each depth's candidates, root first."""

    columns: tuple[int, ...]
    parent: int
    score: float


def best_first_nodes(rows: Rows, nodes: int) -> list[HeapNode]:
    """The best `nodes` nodes, root included; of equal ones the shallower, then by columns (rows
    must be sorted, best first)."""
    return _popped(rows, nodes, lambda depth, offers: depth)


def scored_nodes(increments: Rows, nodes: int) -> list[HeapNode]:
    """Increments of any sign, sorted in each row: pops the best node that was offered; among equal
    ones the first offered, a pop's child before its sibling."""
    return _popped(increments, nodes, lambda depth, offers: offers)


def _popped(rows: Rows, nodes: int, tie: Callable[[int, int], int]) -> list[HeapNode]:
    """Each pop yields one node and offers its first child and its next sibling. `tie` orders equal
    scores by a node's depth or by how many were offered before it."""
    tree = [HeapNode((), -1, 0.0)]
    heap: list[tuple[float, int, tuple[int, ...], int]] = []
    offers = 0

    def offer(parent: int, column: int) -> None:
        nonlocal offers
        offers += 1
        depth = len(tree[parent].columns)
        if depth < len(rows) and column < len(rows[depth]):
            score = tree[parent].score + rows[depth][column]
            columns = (*tree[parent].columns, column)
            heapq.heappush(heap, (-score, tie(depth, offers), columns, parent))

    offer(0, 0)
    while heap and len(tree) < nodes:
        negative, _, columns, parent = heapq.heappop(heap)
        tree.append(HeapNode(columns, parent, -negative))
        offer(len(tree) - 1, 0)
        offer(parent, columns[-1] + 1)
    return tree


def algorithm1_nodes(rows: Rows, nodes: int) -> list[HeapNode]:
    """Paper Algorithm 1: each pop appends all children of the popped node that the budget holds.
    A row's length is its depth's fan-out."""
    tree = [HeapNode((), -1, 0.0)]
    heap = [(0.0, 0, 0)]
    while heap and len(tree) < nodes:
        negative, _, popped = heapq.heappop(heap)
        columns = tree[popped].columns
        if len(columns) == len(rows):
            continue
        for column, step in enumerate(rows[len(columns)][: nodes - len(tree)]):
            tree.append(HeapNode((*columns, column), popped, step - negative))
            heapq.heappush(heap, (-tree[-1].score, len(columns), len(tree) - 1))
    return tree
