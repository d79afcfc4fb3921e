"""The walk: what is accepted, given the target's choices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_jetspec.trees import DraftTree, best_first_tree
from sglang_jetspec.verification import Sampling, accept, accept_lazily, target_choices

VOCAB = 4


def random_trees(seed: int, batch: int, nodes: int, depth: int, width: int) -> DraftTree:
    random = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(batch, depth, VOCAB, generator=random)
    logprobs, tokens = logits.log_softmax(-1).topk(width)
    roots = torch.randint(VOCAB, (batch,), generator=random)
    limit = torch.randint(depth + 1, (batch,), generator=random)
    return best_first_tree(roots, tokens, logprobs, nodes, depth_limit=limit)


def settings(batch: int, greedy: bool | Tensor = False, **values) -> Sampling:
    """Sampling of B equal requests: temperature, top_k, top_p, min_p."""
    greedy = torch.as_tensor(greedy).expand(batch)
    min_p = values.get("min_p")
    return Sampling(
        temperatures=torch.full((batch,), values.get("temperature", 1.0)),
        top_ks=torch.full((batch,), values.get("top_k", 1 << 30)),
        top_ps=torch.full((batch,), values.get("top_p", 1.0)),
        min_ps=None if min_p is None else torch.full((batch,), min_p),
        greedy=greedy,
        all_greedy=bool(greedy.all()),
    )


def walk(tree: DraftTree, choices: Tensor, request: int, max_depth: int) -> list[int]:
    """The definition, node by node: [root, accepted nodes ...]."""
    path = [0]
    while len(path) <= max_depth:
        matches = [
            node
            for node in range(1, tree.tokens.shape[1])
            if tree.live[request, node]
            and tree.parents[request, node] == path[-1]
            and tree.tokens[request, node] == choices[request, path[-1]]
        ]
        if not matches:
            break
        assert len(matches) == 1
        path += matches
    return path


TREES = {
    "seed": st.integers(0, 10**6),
    "batch": st.integers(1, 4),
    "nodes": st.integers(1, 30),
    "depth": st.integers(1, 6),
    "width": st.integers(1, VOCAB),
}


@given(**TREES, spare=st.integers(-2, 2))
def test_path_is_the_walk_along_the_choices(seed, batch, nodes, depth, width, spare) -> None:
    tree = random_trees(seed, batch, nodes, depth, width)
    choices = torch.randint(VOCAB, (batch, nodes), generator=torch.Generator().manual_seed(seed))
    max_depth = max(depth + spare, 0)
    result = accept(tree, choices, max_depth)
    assert result.path.shape == result.tokens.shape == (batch, max_depth + 1)
    for request in range(batch):
        path = walk(tree, choices, request, max_depth)
        padding = max_depth + 1 - len(path)
        committed = [int(choices[request, node]) for node in path]
        assert result.path[request].tolist() == path + [-1] * padding
        assert result.lengths[request] == len(path)
        assert result.tokens[request].tolist() == committed + [0] * padding
        assert committed[:-1] == tree.tokens[request, path[1:]].tolist()


@given(**TREES)
def test_lazy_greedy_equals_eager_greedy(seed, batch, nodes, depth, width) -> None:
    tree = random_trees(seed, batch, nodes, depth, width)
    logits = torch.randint(
        3, (batch, nodes, VOCAB), generator=torch.Generator().manual_seed(seed)
    ).float()
    greedy = settings(batch, greedy=True)
    eager = accept(tree, target_choices(logits, greedy), depth)
    # The same rows through the walk that draws: every request greedy, the batch not known to be.
    mixed = Sampling(**{**vars(greedy), "all_greedy": False})
    for lazy in (
        accept_lazily(tree, logits, greedy, max_depth=depth),
        accept_lazily(tree, logits, mixed, max_depth=depth),
    ):
        for field in ("path", "lengths", "tokens"):
            assert torch.equal(getattr(lazy, field), getattr(eager, field))


def test_lazy_width_defaults_to_the_deepest_node() -> None:
    tree = random_trees(1, batch=2, nodes=9, depth=5, width=2)
    logits = torch.zeros(2, 9, VOCAB)
    result = accept_lazily(tree, logits, settings(2))
    assert result.path.shape[1] == int(tree.depths.max()) + 1


def test_lazy_draws_only_where_the_walk_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    real = torch.softmax
    monkeypatch.setattr(torch, "softmax", lambda x, dim: rows.append(len(x)) or real(x, dim))
    tree = random_trees(3, batch=4, nodes=20, depth=5, width=3)
    logits = torch.randn(4, 20, VOCAB, generator=torch.Generator().manual_seed(3))
    greedy = torch.tensor([False, True, False, True])
    result = accept_lazily(tree, logits, settings(4, greedy), torch.Generator().manual_seed(3))
    assert sum(rows) == int(result.lengths[~greedy].sum())
    assert (result.lengths > 1).any()
