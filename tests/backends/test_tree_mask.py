"""The flat mask against a loop."""

import torch

from sglang_jetspec.backends.tree_mask import flat_tree_mask


def test_rows_see_the_prefix_and_their_ancestors():
    generator = torch.Generator().manual_seed(0)
    prefix = torch.tensor([3, 0, 7])
    nodes = 5
    ancestors = torch.rand(3, nodes, nodes, generator=generator) < 0.5
    flat = flat_tree_mask(ancestors, prefix, int(prefix.sum()))
    expected = []
    for b, length in enumerate(prefix.tolist()):
        for i in range(nodes):
            expected += [True] * length + ancestors[b, i].tolist()
    assert flat.tolist() == expected
