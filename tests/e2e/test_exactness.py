"""Greedy output in fp32: every token id equals the server without speculation."""

import pytest
from harness import sabotaged, tree
from workloads import CONTEXT, WORKLOADS

SHAPES = [(2, 1, 1), (8, 1, 7), (8, 2, 4), (16, 4, 7), (64, 7, 8), (255, 7, 16)]
SETUPS = [
    *(tree(*shape) for shape in SHAPES),
    tree(16, 4, 7, "--chunked-prefill-size", "64"),
    tree(16, 4, 7, SGLANG_JETSPEC_CPU_OVERLAP="1"),
    tree(8, 4, 7, "--disable-radix-cache", SGLANG_JETSPEC_CPU_OVERLAP="1"),
    tree(12, 4, 7, SGLANG_JETSPEC_TREE="algorithm1"),
]
setups = pytest.mark.parametrize("server", SETUPS, indirect=True, ids=lambda s: s.name)
sabotages = pytest.mark.parametrize(
    "server",
    [sabotaged("no_move"), sabotaged("causal_mask")],
    indirect=True,
    ids=lambda s: s.name,
)


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@setups
def test_every_id_equals_plain_decoding(server, plain):
    server.post("/flush_cache", {})
    for name, workload in WORKLOADS.items():
        assert ids(workload.ask(server)) == ids(plain.answers[name]), f"{name}, cold cache"
    for name in ("single", "batched"):
        assert ids(WORKLOADS[name].ask(server)) == ids(plain.answers[name]), f"{name}, warm cache"


def test_the_limit_workload_reaches_the_context_limit(plain):
    totals = set()
    for answer in plain.answers["context_limit"]:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        totals.add(meta["prompt_tokens"] + meta["completion_tokens"])
    assert len(totals) == 1
    assert CONTEXT - 8 <= totals.pop() <= CONTEXT


@pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)
def test_trees_commit_more_than_two_tokens_a_round(server):
    answers = WORKLOADS["single"].ask(server)
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    rounds = sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    assert tokens / rounds >= 2.0


@sabotages
def test_a_broken_round_shows(server, plain):
    answers = ids(WORKLOADS["batched"].ask(server))
    same = sum(a == b for a, b in zip(answers, ids(plain.answers["batched"]), strict=True))
    assert same < len(answers)
