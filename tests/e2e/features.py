"""Requests that use a feature of the server, the same for every server."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from harness import Answer, Server
from sglang.srt.sampling.custom_logit_processor import (
    DeepseekOCRNoRepeatNGramLogitProcessor as NoRepeatNGram,
)
from sglang.srt.sampling.custom_logit_processor import (
    DisallowedTokensLogitsProcessor,
)
from workloads import long_prompts, prompts

Body = dict[str, Any]
PENALTIES: dict[str, float] = {
    "frequency_penalty": 0.6,
    "presence_penalty": 1.0,
    "repetition_penalty": 1.3,
}
BIAS = {str(token): (-100.0 if token % 2 else 2.0) for token in range(20, 600, 3)}


@dataclass(frozen=True)
class Feature:
    """Bodies for /generate; ``batch`` of them are in flight at once."""

    bodies: Callable[[], list[Body]]
    batch: int = 8

    def ask(self, server: Server) -> list[Answer]:
        def post(body: Body) -> Answer:
            answer = server.post("/generate", body)
            assert answer.status_code == 200, answer.text
            return dict(answer.json())

        with ThreadPoolExecutor(self.batch) as pool:
            return list(pool.map(post, self.bodies()))


def bodies(count: int, seed: int, settings: Sequence[Body], **fields: Any) -> list[Body]:
    """Greedy requests that take turns in using ``settings`` as their sampling parameters."""
    return [
        {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 64, **sampling},
            **fields,
        }
        for prompt, sampling in zip(prompts(count, seed), cycle(settings), strict=False)
    ]


def greedy(count: int, seed: int, *settings: Body, **fields: Any) -> Callable[[], list[Body]]:
    return lambda: bodies(count, seed, settings or ({},), **fields)


LONG = {"max_new_tokens": 128, "ignore_eos": True}
MIXED = (
    {},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.5},
    {},
    {"min_new_tokens": 30},
    {"presence_penalty": -0.9, "logit_bias": BIAS},
)
EXACT_LENGTHS = (1, 2, 3, 7, 8, 9, 16, 17, 64)
LENGTH_FEATURES = {
    "exact lengths": Feature(
        greedy(18, 35, *({"max_new_tokens": m, "ignore_eos": True} for m in EXACT_LENGTHS))
    )
}


def seeded(count: int, seed: int, *settings: Body, **fields: Any) -> Callable[[], list[Body]]:
    """Sampled requests, each with a seed of its own."""

    def make() -> list[Body]:
        made = bodies(count, seed, settings, **fields)
        for index, body in enumerate(made):
            body["sampling_params"]["sampling_seed"] = 1000 * seed + index
        return made

    return make


# SGLang draws a request's tokens by another rule where a neighbour in its batch has top-k or top-p,
# so that these are kept apart here.
SEED_FEATURES = {
    "temperature": Feature(seeded(24, 71, {"temperature": 1.0}, {"temperature": 0.7})),
    "top_k and top_p": Feature(
        seeded(24, 72, {"temperature": 1.0, "top_k": 8}, {"temperature": 1.2, "top_p": 0.9})
    ),
    "penalties": Feature(seeded(16, 73, {"temperature": 0.9, **PENALTIES})),
    "logprobs": Feature(seeded(16, 74, {"temperature": 0.8}, return_logprob=True)),
}
LOGIT_FEATURES = {
    "frequency": Feature(greedy(20, 21, {"frequency_penalty": 0.6, **LONG})),
    "presence": Feature(greedy(20, 22, {"presence_penalty": 1.0, **LONG})),
    "repetition": Feature(greedy(20, 23, {"repetition_penalty": 1.3, **LONG})),
    "all penalties": Feature(greedy(20, 24, {**PENALTIES, **LONG})),
    "rewards": Feature(greedy(10, 25, {"frequency_penalty": -0.4, "repetition_penalty": 0.8})),
    "min_new_tokens": Feature(greedy(20, 26, {"min_new_tokens": 50})),
    "logit_bias": Feature(greedy(20, 27, {"logit_bias": BIAS})),
    "everything": Feature(greedy(20, 28, {**PENALTIES, "logit_bias": BIAS, "min_new_tokens": 40})),
    "mixed": Feature(greedy(48, 29, *MIXED), batch=12),
}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [3, 50, 400]}
LOGPROB_FEATURES = {
    "output logprobs": Feature(greedy(20, 31, return_logprob=True)),
    "all logprobs": Feature(greedy(20, 32, logprob_start_len=0, **LOGPROBS)),
    "logprobs of penalized output": Feature(
        greedy(20, 33, {**PENALTIES, "logit_bias": BIAS}, **LOGPROBS)
    ),
    "logprobs of long prompts": Feature(
        lambda: [
            {**body, "input_ids": list(prompt)}
            for body, prompt in zip(
                bodies(6, 34, [PENALTIES], logprob_start_len=0, **LOGPROBS),
                long_prompts((150, 300, 200, 410, 65, 129)),
                strict=True,
            )
        ]
    ),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
# Close to what the fixture says, so that whole drafts are accepted and grammars end inside trees.
SENTENCES = r"[A-Za-z0-9 ,:+=]{5,90}\.( [A-Z][A-Za-z0-9 ,:+=]{3,60}\.){0,2}"
EBNF = """root ::= sentence (" " sentence)? | word ("; " word)+
sentence ::= [A-Z] [A-Za-z0-9 ,:+=]* "."
word ::= "yes" | "no" | [a-z] [a-z]
"""
EBNF_AS_REGEX = (
    r"[A-Z][A-Za-z0-9 ,:+=]*\.( [A-Z][A-Za-z0-9 ,:+=]*\.)?"
    r"|(yes|no|[a-z]{2})(; (yes|no|[a-z]{2}))+"
)
GRAMMARS = ({"regex": SENTENCES}, {"json_schema": json.dumps(SCHEMA)}, {"ebnf": EBNF})
FAR_FROM_THE_MODEL = {"regex": r"(yes|no), [a-z]{3,9}( [a-z]{2,7}){1,6}!"}
GRAMMAR_FEATURES = {
    "regex": Feature(greedy(12, 41, GRAMMARS[0])),
    "unlikely regex": Feature(greedy(12, 47, FAR_FROM_THE_MODEL)),
    "json_schema": Feature(greedy(12, 42, GRAMMARS[1])),
    "ebnf": Feature(greedy(12, 43, GRAMMARS[2])),
    "grammars among others": Feature(
        greedy(36, 44, {}, *GRAMMARS, {**PENALTIES, **GRAMMARS[0]}, {"logit_bias": BIAS}), batch=12
    ),
    "logprobs under a grammar": Feature(greedy(8, 45, *GRAMMARS, **LOGPROBS)),
}
TAG = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</call>",
}
STRUCTURAL_TAG = {"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}
TAG_FEATURES = {"structural_tag": Feature(greedy(12, 46, STRUCTURAL_TAG))}
NO_REPEAT = {"custom_params": {"ngram_size": 2, "window_size": 90}}
BANNED = {"custom_params": {"token_ids": list(range(30, 600, 7))}}
PROCESSOR_FEATURES = {
    "no repeated n-gram": Feature(
        greedy(16, 51, NO_REPEAT, custom_logit_processor=NoRepeatNGram.to_str())
    ),
    "no repeated n-gram, penalized": Feature(
        greedy(16, 52, PENALTIES | NO_REPEAT, custom_logit_processor=NoRepeatNGram.to_str())
    ),
    "banned tokens": Feature(
        greedy(16, 53, BANNED, custom_logit_processor=DisallowedTokensLogitsProcessor.to_str())
    ),
    "processors among others": Feature(
        lambda: [
            body
            for group in zip(
                bodies(12, 54, [{}, {"frequency_penalty": 0.7}]),
                bodies(12, 55, [NO_REPEAT], custom_logit_processor=NoRepeatNGram.to_str()),
                strict=True,
            )
            for body in group
        ]
    ),
}
FEATURES = (
    LENGTH_FEATURES
    | LOGIT_FEATURES
    | LOGPROB_FEATURES
    | GRAMMAR_FEATURES
    | TAG_FEATURES
    | PROCESSOR_FEATURES
)
