"""`tree_accept` against `verification.accept`, in Triton's interpreter or on a GPU."""

import pytest
import torch

from sglang_jetspec.kernels.tree_accept import naive
from sglang_jetspec.kernels.tree_accept.kernel import tree_accept
from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.trees.shrink import shrink

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def integer(generator, low, high):
    return int(torch.randint(low, high + 1, (), generator=generator))


def case(seed):
    """A tree with dead nodes here and there, and choices that often follow it."""
    generator = torch.Generator().manual_seed(seed)
    batch, depth, width = (
        integer(generator, 1, 2),
        integer(generator, 1, 9),
        integer(generator, 1, 6),
    )
    nodes = integer(generator, 1, 24) if seed % 10 else 256
    tokens = torch.rand(batch, depth, 9, generator=generator).topk(width).indices
    scores = -torch.rand(batch, depth, width, generator=generator)
    scores = scores.sort(descending=True).values
    roots = torch.randint(0, 9, (batch,), generator=generator)
    tree = best_first_tree(roots, tokens, scores, nodes)
    tree = shrink(tree, torch.randint(1, nodes + 1, (batch,), generator=generator))
    choices = torch.randint(0, 9, (batch, nodes), generator=generator)
    children = tree.parents.clamp(min=0) * tree.live
    follow = torch.rand(batch, nodes, generator=generator) < 0.8
    for b in range(batch):
        for i in range(1, nodes):
            if tree.live[b, i] and follow[b, i]:
                choices[b, children[b, i]] = tree.tokens[b, i]
    moved = {name: value.to(DEVICE) for name, value in vars(tree).items()}
    limit = depth if seed % 3 else integer(generator, 0, depth)
    return type(tree)(**moved), choices.to(DEVICE), limit


@pytest.mark.parametrize("seed", range(200))
def test_random_trees(seed):
    tree, choices, limit = case(seed)
    got, expected = tree_accept(tree, choices, limit), naive.tree_accept(tree, choices, limit)
    for name in ("path", "lengths", "tokens"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name


def test_the_cases_walk_down():
    lengths = torch.cat([naive.tree_accept(*case(seed)).lengths for seed in range(200)])
    assert (lengths == 1).sum() > 20
    assert (lengths >= 4).sum() > 20
