"""What a request may ask."""

from types import SimpleNamespace

import pytest

from sglang_jetspec.requests import UNSERVED, refuse_foreign_tokens, unserved


def request(parameters=None, **fields):
    unset = dict.fromkeys((*UNSERVED, "return_logprob", "custom_logit_processor"))
    return SimpleNamespace(**{**unset, "sampling_params": parameters, **fields})


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 5},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.3, "presence_penalty": None},
        {"stop": ["x"], "ignore_eos": True, "n": 2, "min_new_tokens": 4, "regex": None},
        {"logit_bias": {"5": -100}, "sampling_seed": 7},
        {"regex": "a+"},
        {"json_schema": "{}"},
        {"ebnf": 'root ::= "a"'},
        {"structural_tag": "{}"},
    ],
)
def test_served(parameters):
    for backend in ("xgrammar", "llguidance"):
        asked = request(parameters, return_logprob=True, custom_logit_processor="x")
        assert unserved(asked, backend) is None


@pytest.mark.parametrize(
    ("asked", "named"),
    [(request(**{name: [1]}), name) for name in UNSERVED],
)
def test_refused_by_name(asked, named):
    assert unserved(asked, "xgrammar") == named


@pytest.mark.parametrize("kind", ["regex", "json_schema", "ebnf", "structural_tag"])
def test_a_grammar_backend_that_cannot_roll_back_is_named(kind):
    named = f"{kind} under --grammar-backend outlines"
    assert unserved(request({kind: "x"}), "outlines") == named
    assert unserved(request({kind: None}), "outlines") is None


def test_token_ids_outside_the_vocabulary_are_refused():
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))
    for good in (None, [], [0, 99], [[1, 2]]):
        refuse_foreign_tokens(manager, request(), good)
    for bad, named in (([5, 100], "input_ids holds 100"), ([-1, 5], "input_ids holds -1")):
        with pytest.raises(ValueError, match=named):
            refuse_foreign_tokens(manager, request(), bad)


def test_the_refused_fields_exist_in_sglang():
    from sglang.srt.managers.io_struct import GenerateReqInput

    fresh = GenerateReqInput(input_ids=[1])
    assert all(not getattr(fresh, name) for name in UNSERVED)
