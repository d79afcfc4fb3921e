"""A run of tokens ends a request where token after token would."""

import inspect
import random
from array import array
from pathlib import Path

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_jetspec.stops import finish_token_by_token

TARGET = Path(__file__).parent / "fixtures" / "tiny-qwen3" / "target"
EOS = 2


def original(req, length):
    """SGLang's own, also where another test has loaded the plug-in.

    Looked up here: loading replaces the function wherever a module's global holds it.
    """
    inspect.unwrap(Req.update_finish_state)(req, length)


@pytest.fixture(scope="module")
def tokenizer():
    return get_tokenizer(str(TARGET))


def make(tokenizer, **sampling):
    params = SamplingParams(**{"max_new_tokens": 64, **sampling})
    params.normalize(tokenizer)
    req = Req("0", "", array("q", [1]), params, eos_token_ids={EOS}, vocab_size=len(tokenizer))
    req.tokenizer = tokenizer
    return req


def feed(req, tokens, sizes, finish):
    """Runs of the given sizes in turn; (output through the stop, finish reason)."""
    left = list(tokens)
    for size in sizes:
        run, left = left[:size], left[size:]
        if not run or req.finished():
            break
        req.output_ids.extend(run)
        finish(req, len(run))
    reason = req.finished_reason and req.finished_reason.to_json()
    return list(req.output_ids_through_stop), reason


def run_by_run(req, length):
    finish_token_by_token(original, req, length)


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("one river and a cloud over", {"stop": ["cloud", "river"]}),
        ("a river.", {"stop": ["."], "stop_regex": ["r[a-z]+r"]}),
        ("Mira the fox", {"stop": ["fox", "a the"]}),
    ],
)
def test_the_first_stop_of_a_run_wins(tokenizer, text, stops):
    tokens = tokenizer.encode(text)
    plain = feed(make(tokenizer, **stops), tokens, [1] * 99, original)
    assert plain[1] is not None
    assert feed(make(tokenizer, **stops), tokens, [99], run_by_run) == plain


def test_sglang_alone_takes_the_stop_it_looks_for_first(tokenizer):
    """The reason for the hook: without it a run's later stop string wins over its earlier token."""
    tokens = tokenizer.encode("one river and a cloud over")
    river = tokenizer.encode(" river")[0]
    sampling = {"stop": ["cloud"], "stop_token_ids": [river]}
    _, reason = feed(make(tokenizer, **sampling), tokens, [99], original)
    assert reason["matched"] == "cloud"
    _, reason = feed(make(tokenizer, **sampling), tokens, [99], run_by_run)
    assert reason["matched"] == river


def test_a_stop_string_after_the_end_of_the_turn_is_not_seen(tokenizer):
    tokens = [*tokenizer.encode("a river"), EOS, *tokenizer.encode(" and a cloud")]
    plain = feed(make(tokenizer, stop=["cloud"]), tokens, [1] * 99, original)
    assert plain[0][-1] == EOS
    assert feed(make(tokenizer, stop=["cloud"]), tokens, [99], run_by_run) == plain


def test_random_runs_end_as_single_tokens_do(tokenizer):
    rng = random.Random(0)
    stopped = 0
    for _ in range(300):
        tokens = [rng.choice([rng.randrange(20, 668), rng.randrange(20, 60)]) for _ in range(24)]
        if rng.random() < 0.3:
            tokens[rng.randrange(24)] = EOS
        texts = [tokenizer.decode(tokens[i : i + 2]) for i in rng.sample(range(20), 3)]
        sampling = {
            "stop": [text for text in texts if text.strip()],
            "stop_regex": rng.sample(["[a-z] [a-z]", "[0-9]{2}", "e$"], rng.randrange(3)),
            "stop_token_ids": rng.sample(tokens, 1),
            "max_new_tokens": rng.randint(4, 30),
            "ignore_eos": rng.random() < 0.3,
        }
        sizes = [rng.randint(1, 8) for _ in range(24)]
        plain = feed(make(tokenizer, **sampling), tokens, [1] * 24, original)
        assert feed(make(tokenizer, **sampling), tokens, sizes, run_by_run) == plain
        stopped += plain[1] is not None and plain[1]["type"] == "stop"
    assert stopped > 100


class Grammar:
    """Terminated from the start, as SGLang's is once it was advanced over a whole run."""

    def is_terminated(self):
        return True


def test_a_grammar_ends_a_request_with_the_last_token_of_a_run(tokenizer):
    tokens = tokenizer.encode("a river and")
    req = make(tokenizer, stop=["cloud"])
    req.grammar = Grammar()
    ids, reason = feed(req, tokens, [99], run_by_run)
    assert ids == tokens
    assert reason == {"type": "stop", "matched": tokens[-1]}
