"""Acceptance of a batch of trees in one launch, one program a request, no host sync.

The walk starts at the root. At each node reached, the child that holds the target's choice there is
next; without one, the choice is the bonus token and the walk ends. Choices are argmaxes or draws of
the target's law, the rule is the same (`verification.acceptance`).

B requests, N tree nodes, D the deepest level walked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree
from sglang_jetspec.verification.acceptance import Acceptance


@triton.jit
def _tree_accept(
    tokens,
    parents,
    live,
    choices,
    path_out,
    tokens_out,
    lengths_out,
    N,
    STEPS,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_N)
    inside = index < N
    first = request * N
    token = tl.load(tokens + first + index, mask=inside, other=-1)
    parent = tl.load(parents + first + index, mask=inside, other=-1)
    # The root's parent is -1, so that it is nobody's child.
    parent = tl.where(tl.load(live + first + index, mask=inside, other=0) != 0, parent, -1)

    step = tl.arange(0, BLOCK_S)
    path = tl.full((BLOCK_S,), -1, tl.int32)
    committed = tl.zeros((BLOCK_S,), tl.int64)
    node = 0
    length = 0
    while (node < BLOCK_N) & (length < STEPS):
        choice = tl.load(choices + first + node)
        path = tl.where(step == length, node, path)
        committed = tl.where(step == length, choice, committed)
        length += 1
        matching = (parent == node) & (token == choice)
        node = tl.min(tl.where(matching, index, BLOCK_N), 0)
    out = request * STEPS + step
    tl.store(path_out + out, path.to(tl.int64), mask=step < STEPS)
    tl.store(tokens_out + out, committed, mask=step < STEPS)
    tl.store(lengths_out + request, length.to(tl.int64))


def tree_accept(tree: DraftTree, choices: Tensor, max_depth: int) -> Acceptance:
    """`verification.accept` as one kernel.

    Args:
        tree: B trees of N nodes; siblings hold distinct tokens.
        choices: [B, N] int64, the target's choice at each node.
        max_depth: D; deeper nodes are not accepted.
    """
    batch, nodes = choices.shape
    steps = max_depth + 1
    path, tokens = (choices.new_empty(batch, steps) for _ in range(2))
    lengths = choices.new_empty(batch)
    _tree_accept[(batch,)](
        tree.tokens.contiguous(),
        tree.parents.contiguous(),
        tree.live.contiguous().view(torch.int8),
        choices.contiguous(),
        path,
        tokens,
        lengths,
        nodes,
        steps,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_S=triton.next_power_of_2(steps),
        num_warps=1,
    )
    return Acceptance(path, lengths, tokens)
