"""Every builder against its heap version, and what every tree must satisfy."""

import math
from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sglang_jetspec.trees import (
    TREE_BUILDERS,
    DraftTree,
    TreeBuilder,
    algorithm1_tree,
    best_first_tree,
    max_nodes,
    tree_builder,
)
from sglang_jetspec.trees.best_first_cpu import best_first_tree_cpu
from sglang_jetspec.trees.heap import algorithm1_nodes, best_first_nodes, scored_nodes

RATES = [[0.9, 0.5, 0.1], [0.6, 0.01, 0.0], [0.0]]
OPTIONS = {
    "hybrid": {"alpha": 0.5},
    "profile": {"rates": RATES, "threshold": 0.1},
    "top2gap": {"beta": 1.0},
}
KINDS = {name: tree_builder(TREE_BUILDERS, name, OPTIONS.get(name, {})) for name in TREE_BUILDERS}
ORACLES = {"best_first": best_first_nodes, "algorithm1": algorithm1_nodes}
BUILDERS = pytest.mark.parametrize("name", sorted(ORACLES))
ALL_BUILDERS = pytest.mark.parametrize("name", sorted(set(KINDS) - {"chain", "ddtree"}))


@dataclass(frozen=True)
class Case:
    """Drafts of B requests whose token ids tell their depth and column: 100 * depth + column."""

    logprobs: Tensor  # [B, D, W]
    nodes: int

    @property
    def tokens(self) -> Tensor:
        batch, depth, width = self.logprobs.shape
        ids = 100 * torch.arange(1, depth + 1).unsqueeze(1) + torch.arange(width)
        return ids.expand(batch, -1, -1)

    @property
    def roots(self) -> Tensor:
        return torch.full((len(self.logprobs),), 7)

    @property
    def entropies(self) -> Tensor:
        """[B, D] in halves, 0 to 3, by depth and request."""
        batch, depth, _ = self.logprobs.shape
        return (torch.arange(batch * depth) * 5 % 7 / 2).view(batch, depth)

    def build(self, builder, **options) -> DraftTree:
        return builder(self.roots, self.tokens, self.logprobs, self.nodes, **options)

    def named(self, name: str, **options) -> DraftTree:
        return self.build(KINDS[name], entropies=self.entropies, **options)


@st.composite
def cases(draw, max_step: int = 4000, max_nodes: int = 40) -> Case:
    """Sorted log-probabilities in 1/256ths, so that every sum is exact; a small `max_step` makes
    ties common."""
    batch, depth, width = (draw(st.integers(1, high)) for high in (3, 6, 5))
    rows = st.lists(st.integers(0, max_step), min_size=width, max_size=width).map(sorted)
    steps = [[draw(rows) for _ in range(depth)] for _ in range(batch)]
    return Case(torch.tensor(steps) / -256.0, draw(st.integers(1, max_nodes)))


def columns(tree: DraftTree, request: int) -> list[tuple[int, ...]]:
    """Each live node as the columns on its path, in tree order."""
    found: list[tuple[int, ...]] = []
    for node in range(int(tree.live[request].sum())):
        if node == 0:
            found.append(())
            continue
        depth, column = divmod(int(tree.tokens[request, node]), 100)
        above = found[int(tree.parents[request, node])]
        assert depth == len(above) + 1 == int(tree.depths[request, node])
        found.append((*above, column))
    return found


@BUILDERS
@given(case=cases())
def test_same_scores_as_the_heap(name: str, case: Case) -> None:
    tree = case.named(name)
    for request, rows in enumerate(case.logprobs.tolist()):
        expected = ORACLES[name](rows, case.nodes)
        live = tree.live[request]
        assert int(live.sum()) == len(expected)
        scores = sorted(tree.logprobs[request][live].tolist(), reverse=True)
        assert scores == sorted((node.score for node in expected), reverse=True)


@BUILDERS
@given(case=cases(max_step=10**6))
def test_same_nodes_as_the_heap_without_ties(name: str, case: Case) -> None:
    tree = case.named(name)
    for request, rows in enumerate(case.logprobs.tolist()):
        wide = ORACLES[name](rows, case.nodes + 1)
        if len({node.score for node in wide}) == len(wide):
            expected = {node.columns for node in ORACLES[name](rows, case.nodes)}
            assert set(columns(tree, request)) == expected


@given(case=cases(max_step=3))
def test_algorithm1_is_the_heap_node_for_node(case: Case) -> None:
    """Ties included: the shallowest, then the oldest of the best is popped."""
    tree = case.build(algorithm1_tree)
    for request, rows in enumerate(case.logprobs.tolist()):
        assert columns(tree, request) == [n.columns for n in algorithm1_nodes(rows, case.nodes)]


def expected_nodes(name: str, rows: list[list[float]], entropies: list[float], nodes: int):
    """The textbook loop of a kind."""
    width = len(rows[0])
    if name in ("hybrid", "entropy"):
        share, weight = (1.0, 0.5) if name == "hybrid" else (0.0, 1.0)
        scores = [
            [share * step + weight * h for step in row]
            for row, h in zip(rows, entropies, strict=True)
        ]
        return scored_nodes(scores, nodes)
    counts = [width] * len(rows)
    if name == "profile":
        kept = [sum(rate >= 0.1 for rate in row) for row in RATES]
        counts = [max(1, min(count, width)) for count in kept] + counts
    if name == "top2gap" and width > 1:
        shares = [1 / (1 + math.exp(row[0] - row[1] - 1)) for row in rows]
        counts = [max(1, min(round(width * share), width)) for share in shares]
    capped = [row[:count] for row, count in zip(rows, counts, strict=False)]
    return algorithm1_nodes(capped, nodes)


@pytest.mark.parametrize("name", ["hybrid", "entropy", "profile", "top2gap"])
@given(case=cases(max_step=400))
def test_other_kinds_are_their_textbook_loops_node_for_node(name: str, case: Case) -> None:
    tree = case.named(name)
    for request, rows in enumerate(case.logprobs.tolist()):
        expected = expected_nodes(name, rows, case.entropies[request].tolist(), case.nodes)
        assert columns(tree, request) == [node.columns for node in expected]


@given(case=cases(max_step=6), limit=st.integers(0, 6))
def test_kinds_that_are_others_in_a_limit(case: Case, limit: int) -> None:
    limits = torch.full_like(case.roots, limit)
    hybrid = tree_builder(TREE_BUILDERS, "hybrid", {"alpha": 0.0})
    flat = case.build(hybrid, depth_limit=limits, entropies=case.entropies)
    best = case.build(best_first_tree, depth_limit=limits)
    wide = tree_builder(TREE_BUILDERS, "top2gap", {"beta": 0.0, "center": 0.0})
    profile = tree_builder(TREE_BUILDERS, "profile", {"rates": []})
    whole = case.build(algorithm1_tree, depth_limit=limits)
    half = (case.logprobs.shape[2] + 1) // 2
    capped = torch.full(case.logprobs.shape[:2], half)
    for request in range(len(case.logprobs)):
        live = best.live[request]
        assert flat.live[request].equal(live)
        totals = [tree.logprobs[request, live].sort().values for tree in (flat, best)]
        assert totals[0].equal(totals[1])
        assert columns(case.build(profile, depth_limit=limits), request) == columns(whole, request)
    if case.logprobs.shape[2] % 2:  # 0.5 rounds to the even count
        return
    same = case.build(algorithm1_tree, depth_limit=limits, fan_out=capped)
    assert case.build(wide, depth_limit=limits).tokens.equal(same.tokens)


@ALL_BUILDERS
@given(case=cases(max_step=6), limits=st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_structure(name: str, case: Case, limits: list[int]) -> None:
    batch, depth, width = case.logprobs.shape
    limit = torch.tensor(limits[:batch])
    tree = case.named(name, depth_limit=limit)
    index = torch.arange(case.nodes)
    assert (tree.parents < index).all()
    assert (tree.depths <= limit.unsqueeze(1)).all()
    for request in range(batch):
        nodes = columns(tree, request)
        reachable = max_nodes(width, min(depth, limits[request]))
        assert len(nodes) == len(set(nodes)) <= min(case.nodes, reachable)
        if name not in ("profile", "top2gap"):
            assert len(nodes) == min(case.nodes, reachable)
        for node in range(case.nodes):
            seen = set(index[tree.ancestors[request, node]].tolist())
            if node >= len(nodes):
                assert seen == {node}
                fields = (tree.tokens, tree.parents, tree.depths)
                assert [int(field[request, node]) for field in fields] == [0, 0, 0]
                assert tree.logprobs[request, node] == -math.inf
                continue
            chain, at = {node}, node
            while at:
                at = int(tree.parents[request, at])
                chain.add(at)
            assert seen == chain
            steps = [case.logprobs[request, d, c].item() for d, c in enumerate(nodes[node])]
            assert tree.logprobs[request, node] == sum(steps)
    assert (tree.tokens[:, 0] == case.roots).all()
    assert (tree.parents[:, 0] == -1).all()


@given(case=cases(max_step=3))
def test_larger_budget_keeps_the_smaller_tree(case: Case) -> None:
    small = case.build(best_first_tree)
    large = Case(case.logprobs, case.nodes + 1).build(best_first_tree)
    for request in range(len(case.logprobs)):
        assert columns(large, request)[: case.nodes] == columns(small, request)


@given(case=cases(max_step=3))
def test_best_first_is_ordered_by_score_then_depth(case: Case) -> None:
    tree = case.build(best_first_tree)
    for scores, depths, live in zip(tree.logprobs, tree.depths, tree.live, strict=True):
        keys = list(zip((-scores[live]).tolist(), depths[live].tolist(), strict=True))
        assert keys == sorted(keys)


@given(case=cases(), seed=st.integers(0, 99))
def test_best_first_needs_no_sorted_columns(case: Case, seed: int) -> None:
    shuffled = torch.randperm(case.logprobs.shape[2], generator=torch.manual_seed(seed))
    tree = case.build(best_first_tree)
    again = best_first_tree(
        case.roots, case.tokens[..., shuffled], case.logprobs[..., shuffled], case.nodes
    )
    assert torch.equal(tree.logprobs, again.logprobs)


@ALL_BUILDERS
@given(case=cases(max_step=5), limit=st.integers(0, 6))
def test_rows_do_not_depend_on_the_batch(name: str, case: Case, limit: int) -> None:
    whole = case.named(name, depth_limit=torch.full_like(case.roots, limit))
    for request in range(len(case.logprobs)):
        part = slice(request, request + 1)
        alone = Case(case.logprobs[part], case.nodes).build(
            KINDS[name], depth_limit=torch.tensor([limit]), entropies=case.entropies[part]
        )
        for field in ("tokens", "parents", "depths", "logprobs", "live", "ancestors"):
            assert torch.equal(getattr(alone, field)[0], getattr(whole, field)[request])


@BUILDERS
def test_width_one_is_a_chain(name: str) -> None:
    case = Case(torch.full((2, 5, 1), -0.5), nodes=4)
    tree = case.named(name)
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert tree.tokens.tolist() == [[7, 100, 200, 300]] * 2
    assert torch.equal(tree.ancestors, torch.ones(2, 4, 4).tril().bool())


@BUILDERS
def test_depth_limits_of_zero_and_one(name: str) -> None:
    case = Case(torch.tensor([[-1.0, -2.0, -3.0]] * 4).expand(2, -1, -1), nodes=5)
    tree = case.named(name, depth_limit=torch.tensor([0, 1]))
    assert tree.live.tolist() == [[True] + [False] * 4, [True] * 4 + [False]]
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 0], [-1, 0, 0, 0, 0]]
    assert tree.ancestors[0].equal(torch.eye(5).bool())


def test_impossible_tokens_are_never_in_the_best_tree() -> None:
    logprobs = torch.tensor([[[-0.1, -math.inf], [-0.2, -0.3]]])
    tree = Case(logprobs, nodes=8).build(best_first_tree)
    assert columns(tree, 0) == [(), (0,), (0, 0), (0, 1)]


@ALL_BUILDERS
def test_half_precision_log_probabilities_are_summed_in_fp32(name: str) -> None:
    case = Case(torch.full((1, 6, 1), -0.1, dtype=torch.bfloat16), nodes=7)
    tree = case.named(name)
    step = case.logprobs[0, 0, 0].float()
    assert tree.logprobs.dtype == torch.float32
    assert tree.logprobs[0, 6].item() == pytest.approx(6 * step.item(), rel=1e-6)


@BUILDERS
@pytest.mark.parametrize(
    ("roots", "tokens", "logprobs", "nodes", "names"),
    [
        ((2,), (2, 3, 4), (2, 3, 5), 8, "top_logprobs"),
        ((2,), (3, 4), (3, 4), 8, "top_tokens"),
        ((3,), (2, 3, 4), (2, 3, 4), 8, "roots"),
        ((2,), (2, 3, 4), (2, 3, 4), 0, "nodes = 0"),
        ((2,), (2, 0, 4), (2, 0, 4), 8, "D and W must be at least 1"),
    ],
)
def test_bad_input_is_named(name, roots, tokens, logprobs, nodes, names) -> None:
    with pytest.raises(ValueError, match=names):
        KINDS[name](
            torch.zeros(roots, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(logprobs),
            nodes,
        )


def test_max_nodes() -> None:
    assert max_nodes(1, 5) == 6
    assert max_nodes(2, 3) == 15
    assert max_nodes(4, 0) == 1
    assert max_nodes(16, 31) == 1 << 16
    assert max_nodes(7, 16, cap=256) == 256


@pytest.mark.parametrize(("nodes", "least_gain"), [(16, 2.0), (32, 1.7), (64, 1.5)])
def test_algorithm1_accepts_far_less_at_equal_budget(nodes: int, least_gain: float) -> None:
    """Expected accepted drafts under the head's own distribution = total probability of the nodes.

    Fifteen peaked rows (logits 12 x normal over 1,000 tokens), 7 candidates each, 200 draws.
    """
    logits = 12.0 * torch.randn(200, 15, 1000, generator=torch.Generator().manual_seed(0))
    logprobs = logits.log_softmax(-1).topk(7).values
    best, plain = (
        Case(logprobs, nodes).build(builder).logprobs[:, 1:].exp().sum(1).mean().item()
        for builder in (best_first_tree, algorithm1_tree)
    )
    assert best > least_gain * plain


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("beam", {}, "tree='beam': use one of algorithm1, best_first, chain"),
        ("hybrid", {"alpha": "high"}, r"hybrid.*float.*alpha.*Its options: alpha"),
        ("hybrid", {"beta": 1.0}, r"unknown field `beta`"),
        ("top2gap", {"beta": -1}, r"top2gap.*>= 0.*beta.*Its options: beta, center"),
        ("profile", {}, "rates"),
        ("profile", {"rates": [[1.5]]}, "<= 1"),
        ("profile", {"rates": [], "threshold": 0}, "threshold"),
        ("entropy", {"sign": 2}, "use 1 or -1"),
        ("chain", {"alpha": 1.0}, "Its options: none"),
    ],
)
def test_options_are_typed(name, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        tree_builder(TREE_BUILDERS, name, options)


def test_a_kind_that_builds_nothing_is_no_builder() -> None:
    with pytest.raises(TypeError, match="abstract method 'build'"):
        TreeBuilder()


@pytest.mark.parametrize("name", ["hybrid", "entropy"])
def test_scores_that_need_entropies_say_so(name) -> None:
    with pytest.raises(ValueError, match="entropies"):
        Case(torch.zeros(1, 2, 2), 4).build(KINDS[name])


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_row_of_one_possible_token_has_a_gap(beta) -> None:
    """Its gap is infinite; without a steepness it counts as any other."""
    logprobs = torch.tensor([[[0.0, -math.inf, -math.inf, -math.inf]] * 2])
    builder = tree_builder(TREE_BUILDERS, "top2gap", {"beta": beta})
    assert builder.fan_out(logprobs).tolist() == [[2, 2] if beta == 0 else [1, 1]]
    tree = Case(logprobs, 4).build(builder)
    assert tree.depths[tree.live].tolist() == [0, 1, 2]


@given(
    case=cases(max_step=5),
    dead=st.integers(0, 8),
    limits=st.none() | st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_compiled_builder_is_the_tensor_program(case: Case, dead: int, limits: list | None) -> None:
    """Bit for bit, candidates of no probability and ties included."""
    logprobs = case.logprobs.masked_fill(case.logprobs < -dead / 256.0, -math.inf)
    limit = None if limits is None else torch.tensor(limits[: len(logprobs)])
    case = Case(logprobs, case.nodes)
    expected = case.build(best_first_tree, depth_limit=limit)
    tree = case.build(best_first_tree_cpu, depth_limit=limit)
    for field in fields(DraftTree):
        assert torch.equal(getattr(tree, field.name), getattr(expected, field.name)), field.name


def test_compiled_builder_takes_rounded_log_probabilities() -> None:
    """Slightly above 0, as rounding makes them, and NaN: parents first, finite scores."""
    case = Case(torch.tensor([[[1e-7, -1.0], [1e-7, -2.0], [math.nan, -1.0]]]), 6)
    tree = case.build(best_first_tree_cpu)
    assert (tree.parents < torch.arange(6)).all()
    assert tree.logprobs[tree.live].isfinite().all()
