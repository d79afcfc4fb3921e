"""Lossless acceptance: walk the tree along the target's own choices.

At every node reached the target chooses its next token as plain decoding would (argmax, or one
draw of its law). A child holding that token is accepted, otherwise the token is the bonus and the
round ends. The tree is fixed before any choice is made, so each committed token is the target's
own, whatever was drafted; drafts are point-mass proposals and the head's probabilities play no
part (JetSpec paper, verification; equal in law to accepting a child with probability p and
renormalising p without it when refused).

Shapes: B requests, N tree nodes, V vocabulary, D the deepest level walked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_jetspec.trees.draft_tree import DraftTree
from sglang_jetspec.verification.sampling import Sampling, argmax_lowest, draw


@dataclass(frozen=True)
class Acceptance:
    """What a round commits per request."""

    path: Tensor  # [B, D+1] int64 accepted nodes, the root first, then -1
    lengths: Tensor  # [B] int64 tokens committed: accepted drafts + 1 bonus token
    tokens: Tensor  # [B, D+1] int64 accepted draft tokens, the bonus token, then 0


def accept(tree: DraftTree, choices: Tensor, max_depth: int) -> Acceptance:
    """Follows the child whose token is its parent's choice, on all requests at once.

    Args:
        tree: B trees of N nodes; siblings hold distinct tokens.
        choices: [B, N] int64, the target's choice at each node.
        max_depth: D; deeper nodes are not accepted.

    Returns:
        Acceptance, computed without reading a value back to the host.
    """
    batch, nodes = choices.shape
    chosen = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))
    chosen &= tree.live
    chosen[:, 0] = True
    # Reached: chosen, and so are all ancestors. As siblings differ, one node at most per depth.
    reached = ~(tree.ancestors & ~chosen.unsqueeze(1)).any(2)
    reached &= tree.depths <= max_depth
    spot = tree.depths.masked_fill(~reached, max_depth + 1)
    path = choices.new_full((batch, max_depth + 2), -1)
    path.scatter_(1, spot, torch.arange(nodes, device=choices.device).expand(batch, -1))
    path = path[:, :-1]  # the last column took the nodes that were not reached
    on_path = path >= 0
    tokens = choices.gather(1, path.clamp(min=0)) * on_path
    return Acceptance(path, on_path.sum(1), tokens)


def accept_lazily(
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    max_depth: int | None = None,
) -> Acceptance:
    """`accept` with draws made only at the nodes a walk visits. Same law, for CPUs.

    It looks at the data after every step, which costs nothing on a CPU and a host
    synchronisation a level on a device.

    Args:
        tree: B trees of N nodes.
        logits: [B, N, V] the target's logits at the nodes.
        sampling: the requests' settings.
        generator: random source; None: torch's default.
        max_depth: D of the result's shape; None: the deepest node.
    """
    depth = int(tree.depths.max()) if max_depth is None else max_depth
    if sampling.all_greedy:
        return accept(tree, argmax_lowest(logits), depth)

    batch = len(logits)
    path = tree.tokens.new_full((batch, depth + 1), -1)
    tokens = tree.tokens.new_zeros(batch, depth + 1)
    walking = torch.arange(batch, device=logits.device)  # requests still on a path
    node = torch.zeros_like(walking)
    for level in range(depth + 1):
        choice = _choose(logits[walking, node], sampling.rows(walking, level), generator)
        path[walking, level] = node
        tokens[walking, level] = choice
        children = (tree.parents[walking] == node.unsqueeze(1)) & tree.live[walking]
        children &= tree.tokens[walking] == choice.unsqueeze(1)
        found, child = children.max(1)
        walking, node = walking[found], child[found]
        if not len(walking):
            break
    return Acceptance(path, (path >= 0).sum(1), tokens)


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """The target's choice on [M, V] rows: [M] int64; greedy rows are not drawn."""
    sampled = (~sampling.greedy).nonzero().squeeze(1)
    if len(sampled) == len(logits):
        return draw(logits, sampling, generator)
    choices = argmax_lowest(logits)
    if len(sampled):
        choices[sampled] = draw(logits[sampled], sampling.rows(sampled), generator)
    return choices
