"""Random requests, the comparison of their answers, and the reduction of a difference."""

import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from sglang_jetspec.tools.fuzz.answers import (
    Answer,
    _answer,
    difference,
    differences,
    has_one_score,
    refusal,
)
from sglang_jetspec.tools.fuzz.cases import Case, Corpus, Group, is_greedy, make_groups
from sglang_jetspec.tools.fuzz.features import GRAMMARS
from sglang_jetspec.tools.fuzz.run import requests
from sglang_jetspec.tools.fuzz.shrink import shrink

TARGET = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3" / "target"
CONTEXT = 512


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.of(PreTrainedTokenizerFast.from_pretrained(TARGET), 0, CONTEXT)


@pytest.fixture(scope="module")
def groups(corpus: Corpus) -> list[Group]:
    return make_groups(corpus, seed=0, requests=2000)


def bodies(groups):
    cases = [case for group in groups for case in group.cases]
    return [body for case in cases for body in (case.body, case.follow_up) if body is not None]


def test_a_seed_stands_for_its_requests(corpus, groups):
    assert make_groups(corpus, seed=0, requests=2000) == groups
    assert make_groups(corpus, seed=1, requests=2000) != groups
    assert sum(map(requests, groups)) == 2000


def test_groups_survive_the_file_they_are_replayed_from(groups):
    again = msgspec.json.decode(msgspec.json.encode(groups), type=list[Group])
    assert again == groups


def test_every_feature_and_mix_occurs(groups):
    seen = Counter()
    for body in bodies(groups):
        sampling = body["sampling_params"]
        seen.update(key for key, value in sampling.items() if value not in (None, False))
        seen.update(key for key, value in body.items() if value is not False)
        seen["greedy"] += is_greedy(body)
    for name in (
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"),
        *("logit_bias", "top_p", "min_p", "top_k", "stop", "stop_token_ids", "stop_regex"),
        *("no_stop_trim", "ignore_eos", "skip_special_tokens", *GRAMMARS, "return_logprob"),
        *("top_logprobs_num", "token_ids_logprob", "logprob_start_len", "custom_logit_processor"),
        *("n", "stream", "stream_interval"),
    ):
        assert seen[name] > 20, name
    assert 0.8 < seen["greedy"] / 2000 < 0.95
    assert 0.1 < sum(group.flush for group in groups) / len(groups) < 0.4
    assert {len(group.cases) for group in groups} >= {1, 2, 8, 12}
    assert sum(case.follow_up is not None for group in groups for case in group.cases) > 50


def test_prompts_fit_the_context_and_share_prefixes(groups):
    prompts = [tuple(case.body["input_ids"]) for group in groups for case in group.cases]
    assert all(1 <= len(prompt) < CONTEXT for prompt in prompts)
    assert sum(len(prompt) > CONTEXT - 45 for prompt in prompts) > 50
    long = Counter(prompt[:100] for prompt in prompts if len(prompt) > 150)
    assert long.most_common(1)[0][1] > 50


ANSWER = Answer(
    status=200,
    ids=[5, 6, 7],
    text="abc",
    finish={"type": "length", "length": 3},
    prompt_tokens=9,
    completion_tokens=3,
    logprobs={
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None], [-0.3, 7, None]],
        "output_top_logprobs": [[[-0.1, 5, None], [-3.0, 8, None]], None, None],
    },
)


def changed(**fields):
    return msgspec.structs.replace(ANSWER, **fields)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (changed(rounds=4), None),
        (changed(ids=[5, 9, 7]), "token 1 is 6, plain 9"),
        (changed(ids=[5, 6]), "3 tokens, plain 2"),
        (changed(text="abd"), "text 'abc', plain 'abd'"),
        (changed(finish={"type": "stop", "matched": 7}), "finish"),
        (changed(prompt_tokens=8), "prompt_tokens 9, plain 8"),
        (refusal(400, "no"), "status 200, plain 400"),
        (changed(logprobs={}), "output_token_logprobs: 3 entries, plain None"),
    ],
)
def test_an_answer_is_compared_in_every_respect(other, what):
    found = difference(ANSWER, other)
    assert found == what if what is None else found.startswith(what)


@pytest.mark.parametrize(
    ("position", "entries", "same"),
    [
        (0, [[-0.1, 8, None], [-3.0, 5, None]], True),
        (0, [[-0.1, 5, None], [-3.01, 8, None]], False),
        (1, [], False),
    ],
)
def test_top_logprobs_are_compared_by_value(position, entries, same):
    top = list(ANSWER.logprobs["output_top_logprobs"])
    top[position] = entries
    other = changed(logprobs={**ANSWER.logprobs, "output_top_logprobs": top})
    assert (difference(ANSWER, other) is None) is same


def test_chosen_logprobs_are_compared_by_token_and_value():
    for entry in ([-0.1, 6, None], [-0.102, 5, None], [None, 5, None]):
        chosen = [entry, *ANSWER.logprobs["output_token_logprobs"][1:]]
        other = changed(logprobs={**ANSWER.logprobs, "output_token_logprobs": chosen})
        assert difference(ANSWER, other).startswith("output_token_logprobs at 0")


def test_log_probabilities_that_depend_on_the_batch_are_only_counted():
    chosen = [[-0.2, *entry[1:]] for entry in ANSWER.logprobs["output_token_logprobs"]]
    other = changed(logprobs={**ANSWER.logprobs, "output_token_logprobs": chosen})
    assert difference(ANSWER, other, scored=False) is None
    short = changed(logprobs={**ANSWER.logprobs, "output_token_logprobs": chosen[:1]})
    assert "3 entries, plain 1" in difference(ANSWER, short, scored=False)
    scored = {(0, -1): True, (1.0, 1): True, (0.3, 1): False, (1.2, 1): False}
    for (temperature, top_k), expected in scored.items():
        assert has_one_score(body(temperature=temperature, top_k=top_k)) is expected


def body(**sampling):
    return {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4, **sampling}}


def test_sampled_requests_must_only_be_sound():
    greedy, sampled = body(temperature=0), body(temperature=0.8)
    group = Group(0, False, [Case(greedy), Case(sampled), Case(sampled)])
    ours = [[[ANSWER]], [[ANSWER]], [[changed(fault="4 token ids, completion_tokens 3")]]]
    theirs = [[[changed(ids=[5, 6, 8])]], [[changed(ids=[1])]], [[ANSWER]]]
    found = differences(group, ours, theirs)
    assert [(one.case, one.what) for one in found] == [
        (0, f"token 2 is 7, plain 8 (finish {ANSWER.finish}, plain {ANSWER.finish})"),
        (2, "4 token ids, completion_tokens 3"),
    ]


def test_a_second_turn_counts_only_after_an_equal_first_one():
    group = Group(0, False, [Case(body(temperature=0), body(temperature=0))])
    other = changed(ids=[5, 6, 8])
    (first,) = differences(group, [[[ANSWER], [ANSWER]]], [[[other], [other]]])
    assert first.turn == 0
    (second,) = differences(group, [[[ANSWER], [ANSWER]]], [[[ANSWER], [other]]])
    assert second.turn == 1


def test_a_difference_is_reduced_to_what_it_needs(corpus):
    """The difference needs the frequency penalty of one request beside a streamed one."""
    guilty = make_groups(corpus, seed=3, requests=40)[0].cases[0].body
    guilty = {**guilty, "return_logprob": True}
    guilty["sampling_params"] = {
        **guilty["sampling_params"],
        **{"max_new_tokens": 64, "frequency_penalty": 0.5, "stop": ["x"], "min_new_tokens": 5},
    }
    streamed = {**body(temperature=0, top_p=0.5), "stream": True}
    others = [Case(body(temperature=0)) for _ in range(5)]
    group = Group(7, True, [*others, Case(guilty, body()), *others, Case(streamed)])

    def differs(group):
        found = [case.body for case in group.cases]
        return any("frequency_penalty" in b["sampling_params"] for b in found) and any(
            b.get("stream") for b in found
        )

    small = shrink(group, differs)
    assert small.number == 7
    first, second = small.cases
    assert first.follow_up is None
    assert first.body["sampling_params"].keys() - {"temperature", "top_k", "max_new_tokens"} == {
        "frequency_penalty"
    }
    assert first.body.keys() == {"input_ids", "sampling_params"}
    assert len(first.body["input_ids"]) == 1
    assert first.body["sampling_params"]["max_new_tokens"] == 1
    assert second.body["stream"] is True
    assert "top_p" not in second.body["sampling_params"]
    json.dumps(msgspec.to_builtins(small))


def test_reduction_ends_after_its_attempts():
    asked = []

    def differs(group):
        asked.append(group)
        return True

    shrink(Group(0, True, [Case(body(stop=["x"], top_p=0.5, min_p=0.1))]), differs, attempts=2)
    assert len(asked) == 2


@pytest.mark.parametrize(("count", "ids"), [(1, []), (3, [15, 16, 17])])
def test_what_a_refused_request_holds_is_no_answer(count, ids):
    """One token means that nothing was generated; longer answers are compared to their end."""
    reason = {"type": "abort", "status_code": 400, "message": "Input length (510 tokens) ..."}
    meta = {"completion_tokens": count, "prompt_tokens": 1, "finish_reason": reason}
    found = {"output_ids": [15, 16, 17][:count], "text": "x" * count, "meta_info": meta}
    answer = _answer(found, {"sampling_params": {"max_new_tokens": None}})
    assert answer.ids == ids
    assert answer.finish == {"type": "abort", "status_code": 400}
