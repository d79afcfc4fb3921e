"""What answers, OpenAI replies and Prometheus say of speculation, and that it adds up."""

import json
from functools import cache

import pytest
from features import BIAS, GRAMMARS, PENALTIES, Feature, bodies
from harness import tree
from prometheus_client.parser import text_string_to_metric_families
from workloads import CONTEXT, LIMIT_LENGTHS, long_prompts

NODES, DEPTH = 16, 7
METRICS = tree(NODES, 4, DEPTH, "--enable-metrics", "--decode-log-interval", "1")
metrics_server = pytest.mark.parametrize("server", [METRICS], indirect=True, ids=["metrics"])
SETTINGS = (
    {},
    {"ignore_eos": True},
    {"stop": ["a", "."], "max_new_tokens": 40},
    {"temperature": 0.9},
    {"max_new_tokens": 3},
    {**GRAMMARS[0]},
    {**GRAMMARS[1], "max_new_tokens": 9},
    {**PENALTIES, "logit_bias": BIAS},
)


@cache
def at_the_limit():
    prompts = long_prompts(LIMIT_LENGTHS)
    fields = [{"max_new_tokens": None, "ignore_eos": True}]
    return [
        {**body, "input_ids": list(prompt)}
        for body, prompt in zip(bodies(len(prompts), 71, fields), prompts, strict=True)
    ]


def all_bodies():
    return bodies(40, 72, SETTINGS) + at_the_limit()


@pytest.fixture
def metas(server):
    """The counts of the requests that were decoded past the prefill, this server's only traffic."""
    if not hasattr(server, "metas"):
        answers = Feature(all_bodies).ask(server)
        found = [answer["meta_info"] for answer in answers]
        server.metas = [meta for meta in found if "spec_verify_ct" in meta]
        assert len(server.metas) > len(found) - 8, "few requests were decoded past the prefill"
    return server.metas


def weighted(histogram):
    return sum(value * rounds for value, rounds in enumerate(histogram))


@metrics_server
def test_the_counts_of_a_request_agree_with_each_other(metas):
    for meta in metas:
        rounds, accepted = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        histogram, nodes = meta["spec_correct_drafts_histogram"], meta["spec_cap_lens_histogram"]
        assert sum(histogram) == sum(nodes) == rounds
        assert weighted(histogram) == accepted
        assert len(histogram) <= DEPTH + 1
        assert len(nodes) <= NODES + 1
        drafted = weighted(nodes) - rounds
        assert meta["spec_num_proposed_drafts"] == drafted
        assert meta["spec_accept_rate"] == pytest.approx(accepted / drafted if drafted else 0.0)
        assert 0.0 <= meta["spec_accept_rate"] <= 1.0
        assert meta["spec_cap_length"] == pytest.approx(weighted(nodes) / rounds)
        # The first token comes from the prefill; a stop may cut the last round.
        cut = 1 + rounds + accepted - meta["completion_tokens"]
        assert 0 <= cut <= DEPTH
        assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / rounds)
        assert (meta["completion_tokens"] - 1) / rounds <= DEPTH + 1


@metrics_server
def test_trees_that_shrank_are_counted_as_they_were(metas):
    """A tree shrinks where the context ends within its budget."""
    shrunk = 0
    for meta in metas:
        left = CONTEXT - meta["prompt_tokens"] - meta["completion_tokens"]
        at_most = meta["spec_verify_ct"] * (NODES - 1)
        assert meta["spec_num_proposed_drafts"] <= at_most
        if left > NODES:
            assert meta["spec_num_proposed_drafts"] == at_most
        else:
            shrunk += meta["spec_num_proposed_drafts"] < at_most
    assert shrunk >= 4


@metrics_server
def test_the_servers_average_is_that_of_its_requests(server, metas):
    rounds = sum(meta["spec_verify_ct"] for meta in metas)
    committed = rounds + sum(meta["spec_num_correct_drafts"] for meta in metas)
    (state,) = server.client.get("/server_info").json()["internal_states"]
    assert state["avg_spec_accept_length"] == pytest.approx(committed / rounds, rel=0.01)


def series(server):
    """Values by series name, summed over labels but the position."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            name = (sample.name, sample.labels.get("position"))
            found[name] = found.get(name, 0.0) + sample.value
    return found


@metrics_server
def test_prometheus_counts_what_the_answers_say(server, metas):
    found = series(server)
    assert found["sglang:spec_verify_calls_total", None] == sum(m["spec_verify_ct"] for m in metas)
    drafted = sum(meta["spec_num_proposed_drafts"] for meta in metas)
    assert found["jetspec:draft_tokens_total", None] == drafted
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    assert found["jetspec:accepted_tokens_total", None] == accepted
    for position in range(1, DEPTH + 1):
        reached = sum(sum(m["spec_correct_drafts_histogram"][position:]) for m in metas)
        name = "jetspec:accepted_tokens_per_position_total"
        assert found.get((name, str(position)), 0.0) == reached
    assert found["sglang:spec_num_draft_tokens", None] == NODES
    assert found["sglang:spec_num_steps", None] == DEPTH
    assert 1.0 <= found["sglang:spec_accept_length", None] <= DEPTH + 1
    assert 1.0 <= found["sglang:spec_cap_length", None] <= NODES


@pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)
def test_openai_replies_carry_the_counts(server):
    messages = [{"role": "user", "content": "Tell a story about Mira the fox."}]
    asked = {"max_tokens": 40, "return_spec_tokens_details": True}
    replies = [
        server.chat(messages, **asked),
        server.post(
            "/v1/completions",
            {"model": "default", "prompt": "Mira the fox", "temperature": 0, **asked},
        ).json(),
        last_piece(server, {"model": "default", "messages": messages, "temperature": 0, **asked}),
    ]
    for reply in replies:
        details = reply["sglext"]["spec_tokens_details"]
        details = details[0] if isinstance(details, list) else details
        rounds = details["spec_verify_ct"]
        assert rounds > 0
        assert sum(details["spec_correct_drafts_histogram"]) == rounds
        assert details["spec_num_proposed_drafts"] == rounds * 15
        assert details["spec_num_correct_drafts"] == weighted(
            details["spec_correct_drafts_histogram"]
        )
        rate = details["spec_num_correct_drafts"] / details["spec_num_proposed_drafts"]
        assert details["spec_accept_rate"] == pytest.approx(rate)


def last_piece(server, body):
    """The piece of a chat stream that carries SGLang's extension."""
    with server.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as r:
        pieces = [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: {")]
    (piece,) = [piece for piece in pieces if piece.get("sglext")]
    return piece
