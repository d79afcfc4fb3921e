"""The exact search where children depend on their path, against all paths listed."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_jetspec.trees import search_tree


@st.composite
def lattices(draw):
    """[D, V, V] log-probabilities of the next token after the previous one, in 1/256ths."""
    depth, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    high = draw(st.sampled_from([3, 4000]))
    count = depth * vocab * vocab
    steps = draw(st.lists(st.integers(0, high), min_size=count, max_size=count))
    return torch.tensor(steps).view(depth, vocab, vocab) / -256.0


def all_paths(lattice, root, width):
    """Every path of the tree in which a node has its `width` best children, with its score."""
    depth, vocab, _ = lattice.shape
    scores = {(): 0.0}
    for length in range(1, depth + 1):
        for path in itertools.product(range(vocab), repeat=length):
            before = path[-2] if length > 1 else root
            row = lattice[length - 1, before]
            if path[:-1] in scores and path[-1] in row.topk(width).indices:
                scores[path] = scores[path[:-1]] + row[path[-1]].item()
    return scores


def search(lattice, root, width, nodes):
    depth = len(lattice)
    kept_tokens = torch.tensor([[root]])

    def expand(level, kept):
        nonlocal kept_tokens
        if kept is not None:
            kept_tokens = kept_tokens.gather(1, kept)
        rows = lattice[level - 1][kept_tokens]  # [1, P, V]
        steps, tokens = rows.topk(width)
        kept_tokens = tokens.flatten(1)
        return tokens, steps

    return search_tree(torch.tensor([root]), expand, depth, width, nodes)


@given(lattice=lattices(), data=st.data())
def test_it_is_the_best_of_all_trees(lattice, data):
    vocab = lattice.shape[1]
    root = data.draw(st.integers(0, vocab - 1))
    width, nodes = data.draw(st.integers(1, vocab)), data.draw(st.integers(1, 20))
    tree = search(lattice, root, width, nodes)
    scores = all_paths(lattice, root, width)
    best = sorted(scores.values(), reverse=True)[:nodes]
    live = tree.live[0]
    assert sorted(tree.logprobs[0][live].tolist(), reverse=True) == best
    found = [()]
    for node in range(1, int(live.sum())):
        path = (*found[int(tree.parents[0, node])], int(tree.tokens[0, node]))
        assert len(path) == tree.depths[0, node]
        assert scores[path] == tree.logprobs[0, node]
        found.append(path)
    assert len(set(found)) == len(best)
