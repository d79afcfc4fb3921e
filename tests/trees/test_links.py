"""First-child and next-sibling links."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_jetspec.trees import best_first_tree
from sglang_jetspec.trees.links import child_links


def listed(tree, request):
    """The links from the definition, node by node."""
    nodes = tree.tokens.shape[1]
    children = {
        parent: [
            node
            for node in range(1, nodes)
            if tree.live[request, node] and tree.parents[request, node] == parent
        ]
        for parent in range(nodes)
    }
    first, following = [-1] * nodes, [-1] * nodes
    for parent, family in children.items():
        for node, after in zip(family, (*family, -1)[1:], strict=True):
            following[node] = after
        if family:
            first[parent] = family[0]
    return first, following


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 5), st.integers(1, 4))
def test_links_equal_the_definition(seed, nodes, depth, width):
    random = torch.Generator().manual_seed(seed)
    logprobs, tokens = torch.randn(3, depth, 6, generator=random).log_softmax(-1).topk(width)
    limit = torch.randint(depth + 1, (3,), generator=random)
    tree = best_first_tree(torch.zeros(3).long(), tokens, logprobs, nodes, depth_limit=limit)
    first, following = child_links(tree)
    for request in range(3):
        expected = listed(tree, request)
        assert (first[request].tolist(), following[request].tolist()) == expected
