"""`tree_build` against the torch program, in Triton's interpreter or on a GPU."""

from dataclasses import fields

import pytest
import torch

from sglang_jetspec.kernels.tree_build import kernel, naive
from sglang_jetspec.trees.draft_tree import LinkedTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drafts(seed, batch, depth, width, ties):
    """Ranked candidates; with `ties`, log-probabilities in halves, so that many sums are equal."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(batch, depth, 1000, generator=generator).topk(width).indices
    scores = -torch.rand(batch, depth, width, generator=generator) * 6
    if ties:
        scores = (scores / 2).round() * 0.5
    if seed % 5 == 0:
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = float("-inf")
    scores = scores.sort(descending=True).values if seed % 3 else scores
    roots = torch.randint(0, 1000, (batch,), generator=generator)
    return [x.to(DEVICE) for x in (roots, tokens, scores)]


def limits(seed, batch, high):
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randint(1, high + 1, (batch,), generator=generator).to(DEVICE)


def assert_equal_trees(got: LinkedTree, expected: LinkedTree):
    for field in fields(LinkedTree):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), field.name


@pytest.mark.parametrize("seed", range(200))
def test_random_trees(seed):
    generator = torch.Generator().manual_seed(seed)
    batch, depth, width = (
        int(torch.randint(1, high + 1, (), generator=generator)) for high in (2, 5, 4)
    )
    nodes = int(torch.randint(1, 14, (), generator=generator))
    arguments = (*drafts(seed, batch, depth, width, ties=seed % 2 == 0), nodes)
    depth_limit = limits(seed, batch, depth) - 1 if seed % 4 == 1 else None
    node_limit = limits(seed, batch, nodes) if seed % 4 > 1 else None
    got = kernel.tree_build(*arguments, depth_limit, node_limit)
    assert_equal_trees(got, naive.tree_build(*arguments, depth_limit, node_limit))


@pytest.mark.parametrize(
    ("nodes", "depth", "width"),
    [(2, 1, 1), (32, 15, 4), (33, 15, 7), (65, 3, 9), (256, 16, 7), (601, 600, 1)],
)
def test_word_boundaries_and_large_trees(nodes, depth, width):
    arguments = (*drafts(nodes, 1, depth, width, ties=True), nodes)
    assert_equal_trees(kernel.tree_build(*arguments), naive.tree_build(*arguments))


def test_log_probabilities_rounded_above_zero_keep_parents_first():
    roots, tokens, _ = drafts(1, 1, 3, 2, ties=False)
    scores = torch.tensor([[[1e-7, -1.0], [1e-7, -2.0], [float("nan"), -1.0]]], device=DEVICE)
    tree = kernel.tree_build(roots, tokens, scores, 6)
    index = torch.arange(6, device=DEVICE)
    assert (tree.parents < index).all()
    assert tree.live.sum() == 6
    assert tree.logprobs.isfinite().all()


@pytest.mark.parametrize("shape", [(1025, 1, 1), (8, 1024, 1), (8, 1, 4097)])
def test_sizes_past_a_key_are_refused(shape):
    nodes, depth, width = shape
    tokens = torch.zeros(1, depth, width, dtype=torch.int64, device=DEVICE)
    roots = tokens[:, 0, 0]
    with pytest.raises(ValueError, match="at most 1024 nodes"):
        kernel.tree_build(roots, tokens, tokens.float(), nodes)
