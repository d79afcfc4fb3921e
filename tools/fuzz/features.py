"""The features a random request may use, each with how often it does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

Body = dict[str, Any]
GRAMMARS = ("regex", "json_schema", "ebnf", "structural_tag")
REGEXES = (
    r"[A-Za-z0-9 ,:+=]{5,90}\.( [A-Z][A-Za-z0-9 ,:+=]{3,60}\.){0,2}",
    r"(yes|no), [a-z]{3,9}( [a-z]{2,7}){1,6}!",
    r"\d{1,3}(, \d{1,3}){2,20}\.",
    r"[^\n]{1,200}",
)
SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 9},
    {"enum": ["Mira the fox", "Otto the otter", 17, None]},
)
EBNFS = (
    """root ::= sentence (" " sentence)? | word ("; " word)+
sentence ::= [A-Z] [A-Za-z0-9 ,:+=]* "."
word ::= "yes" | "no" | [a-z] [a-z]
""",
    """root ::= "Ones: " sum (" " sum)* "."
sum ::= [0-9]+ (" plus " | " + ") [0-9]+ (" is " | " = ") [0-9]+
""",
)


class Vocabulary(msgspec.Struct, frozen=True):
    """Token ids 0 to ``size - 1``, and their texts where they are texts of their own."""

    size: int
    texts: list[str]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        texts = [tokenizer.decode([token]) for token in range(min(len(tokenizer), 4000))]
        return cls(len(tokenizer), [text for text in texts if text.strip() and "�" not in text])


def penalties(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    ranges = {
        "frequency_penalty": (-10, 20),
        "presence_penalty": (-10, 20),
        "repetition_penalty": (7, 20),
    }
    for name in rng.sample(sorted(ranges), rng.choice((1, 1, 2, 3))):
        body["sampling_params"][name] = rng.randint(*ranges[name]) / 10


def minimum(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    sampling = body["sampling_params"]
    sampling["min_new_tokens"] = rng.randint(0, sampling["max_new_tokens"] or 1)


def bias(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    tokens = rng.sample(range(vocabulary.size), rng.choice((1, 5, 40)))
    value = rng.choice((-100.0, -4.0, -1.5, 1.5, 4.0))
    if len(tokens) == 1 and rng.random() < 0.2:
        value = 100.0
    body["sampling_params"]["logit_bias"] = {str(token): value for token in tokens}


def truncation(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    sampling = body["sampling_params"]
    sampling["top_p"] = rng.choice((1.0, 0.95, 0.5))
    sampling["min_p"] = rng.choice((0.0, 0.05, 0.3))
    sampling.setdefault("top_k", rng.choice((-1, 2, 20)))


def stops(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    sampling = body["sampling_params"]
    for kind in rng.sample(("stop", "stop_token_ids", "stop_regex"), rng.choice((1, 1, 2))):
        if kind == "stop":
            sampling[kind] = rng.sample(vocabulary.texts, rng.choice((1, 3)))
        elif kind == "stop_token_ids":
            sampling[kind] = rng.sample(range(vocabulary.size), 8)
        else:
            sampling[kind] = [rng.choice((r"[0-9] [a-z]", r"\.", r"[A-Z][a-z]+ the", "zzzz"))]
    sampling["no_stop_trim"] = rng.random() < 0.4


def text(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    sampling = body["sampling_params"]
    sampling["skip_special_tokens"] = rng.random() < 0.5
    sampling["spaces_between_special_tokens"] = rng.random() < 0.5


def past_the_end(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    body["sampling_params"]["ignore_eos"] = True


def grammar(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    sampling = body["sampling_params"]
    kind = rng.choice(GRAMMARS)
    if kind == "regex":
        sampling[kind] = rng.choice(REGEXES)
    elif kind == "json_schema":
        sampling[kind] = json.dumps(rng.choice(SCHEMAS))
    elif kind == "ebnf":
        sampling[kind] = rng.choice(EBNFS)
    else:
        sampling[kind] = json.dumps({"type": "structural_tag", "format": tag(rng)})
    # Where the grammar allows its end alone and the minimum length forbids it, no token is left.
    sampling.pop("min_new_tokens", None)
    # The server without speculation writes one more token after the grammar's end (serving.md).
    sampling.pop("ignore_eos", None)


def tag(rng: random.Random) -> Body:
    schema = rng.choice(SCHEMAS)
    content = {"type": "json_schema", "json_schema": schema}
    whole = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    if rng.random() < 0.5:
        return whole
    return {"type": "triggered_tags", "triggers": ["<call>"], "tags": [whole]}


def logprobs(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    body["return_logprob"] = True
    if rng.random() < 0.5:
        body["top_logprobs_num"] = rng.choice((1, 3, 8))
    if rng.random() < 0.4:
        body["token_ids_logprob"] = rng.sample(range(vocabulary.size), 3)
    if rng.random() < 0.4:
        body["logprob_start_len"] = rng.randint(0, len(body["input_ids"]) - 1)


def several(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    body["sampling_params"]["n"] = rng.choice((2, 3))


def stream(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    """One answer in pieces; a streamed request with several answers has them interleaved."""
    body["sampling_params"].pop("n", None)
    body["stream"] = True
    body["sampling_params"]["stream_interval"] = rng.choice((1, 1, 3, 8))


@cache
def processors() -> dict[str, str]:
    """SGLang's own custom logit processors as they travel in a request."""
    from sglang.srt.sampling import custom_logit_processor as module

    return {
        "window_size": module.DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
        "token_ids": module.DisallowedTokensLogitsProcessor.to_str(),
    }


def banned_tokens(size: int) -> list[int]:
    """The same for all requests: SGLang's scheduler ends where two in a batch ban other tokens."""
    return random.Random(size).sample(range(20, size), size // 8)


def processor(rng: random.Random, vocabulary: Vocabulary, body: Body) -> None:
    sampling = body["sampling_params"]
    if any(kind in sampling for kind in GRAMMARS):  # together they may leave no token
        return
    if rng.random() < 0.5:
        sampling["custom_params"] = {"ngram_size": 2, "window_size": 90}
    else:
        sampling["custom_params"] = {"token_ids": banned_tokens(vocabulary.size)}
    (name,) = processors().keys() & sampling["custom_params"].keys()
    body["custom_logit_processor"] = processors()[name]


FEATURES: tuple[tuple[float, Callable[[random.Random, Vocabulary, Body], None]], ...] = (
    (0.35, penalties),
    (0.2, minimum),
    (0.2, bias),
    (0.25, truncation),
    (0.35, stops),
    (0.15, text),
    (0.3, past_the_end),
    (0.25, grammar),
    (0.3, logprobs),
    (0.1, processor),
    (0.12, several),
    (0.3, stream),
)
