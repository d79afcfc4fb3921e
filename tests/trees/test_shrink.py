"""Cutting trees near the context limit."""

import torch

from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.trees.shrink import shrink


def test_a_shrunk_tree_is_the_smaller_tree():
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.log_softmax(torch.randn(2, 5, 9, generator=generator), -1)
    top, tokens = logprobs.topk(3, dim=-1)
    roots = torch.tensor([7, 8])
    large = best_first_tree(roots, tokens, top, 12)
    cut = shrink(large, torch.tensor([5, 1]))
    small = best_first_tree(roots, tokens, top, 5)
    assert cut.tokens[0, :5].equal(small.tokens[0])
    assert cut.ancestors[0, :5, :5].equal(small.ancestors[0])
    assert cut.live.tolist() == [[True] * 5 + [False] * 7, [True] + [False] * 11]
    assert cut.ancestors[1].equal(torch.eye(12, dtype=torch.bool))
    assert cut.depths[1].sum() == 0
    assert cut.tokens[1].tolist() == [8] + [0] * 11
