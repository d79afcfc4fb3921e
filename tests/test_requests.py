"""What a request may ask."""

from types import SimpleNamespace

import pytest

from sglang_jetspec.requests import refuse_foreign_tokens, unserved


def request(parameters=None, **fields):
    base = {
        "return_logprob": False,
        "return_hidden_states": False,
        "return_sampling_mask": False,
        "custom_logit_processor": None,
        "sampling_params": parameters,
    }
    return SimpleNamespace(**{**base, **fields})


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 5},
        {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "presence_penalty": None},
        {"stop": ["x"], "ignore_eos": True, "n": 2, "min_new_tokens": 0, "regex": None},
    ],
)
def test_served(parameters):
    assert unserved(request(parameters)) is None


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (request({"frequency_penalty": 0.5}), "frequency_penalty=0.5"),
        (request({"presence_penalty": -0.1}), "presence_penalty=-0.1"),
        (request({"repetition_penalty": 1.1}), "repetition_penalty=1.1"),
        (request({"min_new_tokens": 4}), "min_new_tokens=4"),
        (request({"regex": "a+"}), "regex"),
        (request({"json_schema": "{}"}), "json_schema"),
        (request({"logit_bias": {"5": -100}}), "logit_bias"),
        (request(return_logprob=True), "return_logprob"),
        (request(return_hidden_states=True), "return_hidden_states"),
        (request(custom_logit_processor="x"), "custom_logit_processor"),
    ],
)
def test_refused_by_name(asked, named):
    assert unserved(asked) == named


def test_token_ids_outside_the_vocabulary_are_refused():
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    for good in (None, [], [0, 99], [[1, 2]]):
        refuse_foreign_tokens(manager, request(), good)
    for bad, named in (([5, 100], "input_ids holds 100"), ([-1, 5], "input_ids holds -1")):
        with pytest.raises(ValueError, match=named):
            refuse_foreign_tokens(manager, request(), bad)
