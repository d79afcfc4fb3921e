"""Every request feature gives what the server without speculation gives."""

import json
import re

import pytest
from features import (
    EBNF_AS_REGEX,
    FEATURES,
    GRAMMAR_FEATURES,
    GRAMMARS,
    LOGIT_FEATURES,
    LOGPROB_FEATURES,
    SCHEMA,
    Feature,
    bodies,
)
from harness import CROWDED, LLGUIDANCE, SABOTAGED, broken, small_pool, tree

OVERLAP = {"SGLANG_JETSPEC_CPU_OVERLAP": "1"}
SETUPS = [
    tree(16, 4, 7),
    tree(16, 4, 7, **OVERLAP),
    tree(64, 7, 8, "--chunked-prefill-size", "64"),
]
SMALL_POOLS = [CROWDED, small_pool("--page-size", "16", **OVERLAP)]
LLGUIDANCE_SETUPS = [tree(16, 4, 7, *LLGUIDANCE), tree(16, 4, 7, *LLGUIDANCE, **OVERLAP)]


def servers(setups):
    return pytest.mark.parametrize("server", setups, indirect=True, ids=lambda s: s.name)


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@servers(SETUPS)
@pytest.mark.parametrize("name", FEATURES)
def test_every_id_equals_plain_decoding(server, plain, name):
    answers = FEATURES[name].ask(server)
    assert ids(answers) == ids(plain.answers[name])
    # An answer of one token comes from the prefill, without a round.
    rounds = sum(answer["meta_info"].get("spec_verify_ct", 0) for answer in answers)
    assert sum(map(len, ids(answers))) > 1.04 * rounds, "nothing was accepted: nothing was tested"


@servers(SETUPS[:2])
def test_max_new_tokens_is_exact(server):
    for answer, body in zip(
        FEATURES["exact lengths"].ask(server), FEATURES["exact lengths"].bodies(), strict=True
    ):
        wanted = body["sampling_params"]["max_new_tokens"]
        assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == wanted


@servers([SABOTAGED])
def test_penalties_that_ignore_paths_show(server, plain):
    name = "all penalties"
    with broken("no_paths"):
        answers = ids(FEATURES[name].ask(server))
    pairs = zip(answers, ids(plain.answers[name]), strict=True)
    assert any(ours != theirs for ours, theirs in pairs)
    assert ids(FEATURES[name].ask(server)) == ids(plain.answers[name])


@servers(SETUPS)
@pytest.mark.parametrize("name", [*LOGPROB_FEATURES, "logprobs under a grammar"])
def test_logprobs_equal_plain_decoding(server, plain, name):
    for ours, theirs in zip(FEATURES[name].ask(server), plain.answers[name], strict=True):
        meta, expected = ours["meta_info"], theirs["meta_info"]
        assert len(meta["output_token_logprobs"]) == len(ours["output_ids"])
        kinds = [key for key in expected if key.endswith("logprobs")]
        assert set(kinds) == {key for key in meta if key.endswith("logprobs")}
        for kind in kinds:
            single = kind.endswith("_token_logprobs")
            for mine, other in zip(meta[kind], expected[kind], strict=True):
                mine, other = ([mine], [other]) if single else (mine, other)
                assert possible(mine) == pytest.approx(possible(other), abs=1e-3)


def possible(entries):
    """Log-probability by token of [value, token, text] entries; masked tokens are all alike."""
    return {token: value for value, token, _ in entries or () if value is not None and value > -1e4}


@servers(SMALL_POOLS)
@pytest.mark.parametrize("name", [*LOGIT_FEATURES, "grammars among others"])
def test_a_retracted_request_keeps_its_counts(server, plain, name):
    """A pool too small for the batch: requests come back with the output they had."""
    feature = Feature(FEATURES[name].bodies, batch=16)
    assert ids(feature.ask(server)) == ids(plain.answers[name])


@servers(SMALL_POOLS)
def test_the_small_pool_did_retract(server):
    Feature(FEATURES["all penalties"].bodies, batch=16).ask(server)
    assert "Retract requests" in server.log_text()


@servers(LLGUIDANCE_SETUPS)
@pytest.mark.parametrize("name", GRAMMAR_FEATURES)
def test_llguidance_equals_plain_decoding(server, plain, name):
    answers = FEATURES[name].ask(server)
    assert ids(answers) == ids(plain.llguidance[name])
    for answer, body in zip(answers, FEATURES[name].bodies(), strict=True):
        assert_in_grammar(answer, body["sampling_params"])


@servers(SETUPS[:2])
@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_sampled_output_keeps_to_the_grammar(server, temperature):
    feature = Feature(lambda: bodies(30, 61, [{**g, "temperature": temperature} for g in GRAMMARS]))
    for answer, body in zip(feature.ask(server), feature.bodies(), strict=True):
        assert_in_grammar(answer, body["sampling_params"])


def assert_in_grammar(answer, sampling):
    """Complete answers match the grammar; cut ones are long."""
    if answer["meta_info"]["finish_reason"]["type"] == "length":
        assert len(answer["output_ids"]) == sampling["max_new_tokens"]
        return
    text = answer["text"]
    if "regex" in sampling:
        assert re.fullmatch(sampling["regex"], text)
    if "ebnf" in sampling:
        assert re.fullmatch(EBNF_AS_REGEX, text)
    if "json_schema" in sampling:
        found = json.loads(text)
        assert list(found) == SCHEMA["required"]
        assert isinstance(found["name"], str)
        assert 0 <= found["age"] <= 120
        assert set(found["tags"]) <= {"red", "green"}


@servers(SETUPS[:2])
def test_a_banned_token_never_appears_and_a_forced_one_always_does(server):
    """The repeated-word check of logit bias skipped on verified tokens."""
    prompt = bodies(1, 62, [{}])[0]["input_ids"]
    usual = server.generate(prompt, max_new_tokens=15, ignore_eos=True)["output_ids"]
    for token in set(usual):
        answer = server.generate(
            prompt, max_new_tokens=15, ignore_eos=True, logit_bias={str(token): -100}
        )
        assert token not in answer["output_ids"]
        answer = server.generate(
            prompt, max_new_tokens=15, ignore_eos=True, logit_bias={str(token): 100}
        )
        assert set(answer["output_ids"]) == {token}


@servers(SETUPS[:2])
def test_chat_completions_carry_logprobs_and_a_schema(server):
    answer = server.chat(
        [{"role": "user", "content": "1+1"}],
        max_tokens=40,
        logprobs=True,
        top_logprobs=2,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
    )
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    if choice["finish_reason"] == "stop":
        assert list(json.loads(choice["message"]["content"])) == SCHEMA["required"]
