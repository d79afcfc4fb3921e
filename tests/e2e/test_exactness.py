"""Greedy output in fp32: every token id equals the server without speculation."""

import pytest
from harness import GOLDEN, PAGED, SABOTAGED, SHORT_HEAD, broken, tree
from workloads import CONTEXT, EOS, SCALE, WORKLOADS, acceptance_length

SHAPES = [(2, 1, 1), (8, 1, 7), (16, 4, 7), (64, 7, 8), (255, 7, 16)]
if SCALE > 1:
    SHAPES += [(7, 3, 6), (31, 5, 10), (127, 8, 16), (16, 6, 15), (16, 8, 7), (8, 7, 2)]
SETUPS = [
    *(tree(*shape) for shape in SHAPES),
    GOLDEN,
    PAGED,
    tree(16, 4, 7, SGLANG_JETSPEC_CPU_OVERLAP="1"),
    tree(8, 4, 7, "--disable-radix-cache", SGLANG_JETSPEC_CPU_OVERLAP="1"),
    SHORT_HEAD,
]
if SCALE > 1:
    SETUPS.append(tree(16, 4, 7, "--chunked-prefill-size", "128"))
SERVER_16 = pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)
setups = pytest.mark.parametrize("server", SETUPS, indirect=True, ids=lambda s: s.name)
sabotaged = pytest.mark.parametrize("server", [SABOTAGED], indirect=True, ids=["sabotaged"])


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@setups
def test_every_id_equals_plain_decoding(server, setup, plain, lengths):
    server.post("/flush_cache", {})
    for name, workload in WORKLOADS.items():
        answers = workload.ask(server)
        assert ids(answers) == ids(plain.answers[name]), f"{name}, cold cache"
        lengths.setdefault(name, {})[setup] = acceptance_length(answers)
    for name in ("single", "batched"):
        answers = WORKLOADS[name].ask(server)
        assert ids(answers) == ids(plain.answers[name]), f"{name}, warm cache"
        assert acceptance_length(answers) >= 0.95 * lengths[name][setup]
    assert_wider_trees_accept_no_less(setup, lengths)


def assert_wider_trees_accept_no_less(setup, lengths):
    """Against what was seen so far: trees that hold another's, and the same trees."""
    for name, seen in lengths.items():
        for other in seen:
            if setup.shape is None or other.shape is None:
                continue
            if all(mine >= theirs for mine, theirs in zip(setup.shape, other.shape, strict=True)):
                assert seen[setup] >= 0.97 * seen[other], (name, other.name)
            if all(mine <= theirs for mine, theirs in zip(setup.shape, other.shape, strict=True)):
                assert seen[setup] <= seen[other] / 0.97, (name, other.name)


@pytest.mark.parametrize("server", [SHORT_HEAD], indirect=True, ids=lambda s: s.name)
def test_a_head_of_short_context_drafts_on_beyond_it(server):
    assert "the head sees the last 96 tokens" in server.log_text()
    assert acceptance_length(WORKLOADS["long"].ask(server)) > 1.3


@SERVER_16
def test_an_answer_ends_at_its_first_end_token(server, plain):
    answers = WORKLOADS["batched"].ask(server)
    ended = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(ended) > 20
    for answer in ended:
        assert answer["output_ids"].count(EOS) == 1
        assert answer["output_ids"][-1] == EOS
        assert answer["meta_info"]["finish_reason"]["matched"] == EOS


def test_the_limit_workload_reaches_the_context_limit(plain):
    totals = set()
    for answer in plain.answers["context_limit"]:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        totals.add(meta["prompt_tokens"] + meta["completion_tokens"])
    assert len(totals) == 1
    assert CONTEXT - 8 <= totals.pop() <= CONTEXT


@SERVER_16
def test_trees_commit_more_than_two_tokens_a_round(server):
    answers = WORKLOADS["single"].ask(server)
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    rounds = sum(a["meta_info"]["spec_verify_ct"] for a in answers)
    assert tokens / rounds >= 2.0


@sabotaged
@pytest.mark.parametrize("step", ["no_move", "causal_mask"])
def test_a_broken_round_shows(server, plain, step):
    expected = ids(plain.answers["batched"])
    with broken(step):
        server.post("/flush_cache", {})
        answers = ids(WORKLOADS["batched"].ask(server))
    assert sum(a == b for a, b in zip(answers, expected, strict=True)) < len(answers)
    server.post("/flush_cache", {})  # of what the broken rounds left
    assert ids(WORKLOADS["batched"].ask(server)) == expected
