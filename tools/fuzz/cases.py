"""Seeded random requests over everything a JETSPEC server serves.

A group is in flight together. What it is made of (prompts that share prefixes, second turns that
continue an answer, caches emptied now and then) decides what the prefix cache holds.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from sglang_jetspec.tools.fixture.conversations import conversation
from sglang_jetspec.tools.fuzz.features import FEATURES, Vocabulary

Body = dict[str, Any]
LARGEST_GROUP = 12
LENGTHS = (1, 2, 3, 7, 8, 9, 16, 17, 24, 32, 48, 64)
SAMPLED_SHARE = 0.12  # neighbours of greedy requests, not compared themselves


class Case(msgspec.Struct, frozen=True):
    """One request: a body for POST /generate, and perhaps a second turn.

    follow_up: another body, whose ``input_ids`` are what the second turn appends to the first
    one's prompt and output.
    """

    body: Body
    follow_up: Body | None = None


class Group(msgspec.Struct, frozen=True):
    """Requests in flight together; ``flush``: on a prefix cache emptied before."""

    number: int
    flush: bool
    cases: list[Case]


class Corpus(msgspec.Struct, frozen=True):
    """Prompts as token ids, and the vocabulary they are of."""

    turns: list[list[int]]
    histories: list[list[int]]
    vocabulary: Vocabulary
    context: int

    @classmethod
    def of(cls, tokenizer: Any, seed: int, context: int) -> Corpus:
        """Turns of one user message, and four conversations that fill the context.

        tokenizer: a Hugging Face tokenizer with a chat template. context: tokens a request may
        have, prompt and output.
        """
        rng = random.Random(f"corpus {seed}")

        def turn(number: int) -> list[int]:
            message = {"role": "user", "content": conversation(rng, number)[0]}
            return list(
                tokenizer.apply_chat_template(
                    [message], add_generation_prompt=True, return_dict=False
                )
            )

        turns = [turn(rng.randrange(1000)) for _ in range(80)]
        histories = []
        for _ in range(4):
            ids: list[int] = []
            while len(ids) < context:
                ids += rng.choice(turns)
            histories.append(ids)
        return cls(turns, histories, Vocabulary.of(tokenizer), context)


def is_greedy(body: Body) -> bool:
    """Whether the request's output is determined."""
    sampling = body["sampling_params"]
    return sampling.get("temperature") == 0 or sampling.get("top_k") == 1


def make_groups(corpus: Corpus, seed: int, requests: int) -> list[Group]:
    """Groups of ``requests`` requests in all, a second turn counted as one."""
    groups: list[Group] = []
    left = requests
    while left > 0:
        rng = random.Random(f"{seed} {len(groups)}")
        size = min(left, rng.choice((1, 1, 2, 3, 4, 6, 8, LARGEST_GROUP)))
        cases: list[Case] = []
        while size > 0:
            cases.append(make_case(rng, corpus, second_turn=size > 1 and rng.random() < 0.15))
            turns = 2 if cases[-1].follow_up else 1
            size, left = size - turns, left - turns
        groups.append(Group(len(groups), rng.random() < 0.25, cases))
    return groups


def make_case(rng: random.Random, corpus: Corpus, second_turn: bool) -> Case:
    if not second_turn:
        return Case(make_body(rng, corpus, prompt(rng, corpus)))
    first = make_body(rng, corpus, rng.choice(corpus.turns))
    first["sampling_params"] |= {"temperature": 0, "n": 1}
    return Case(first, make_body(rng, corpus, rng.choice(corpus.turns)))


def prompt(rng: random.Random, corpus: Corpus) -> list[int]:
    """A turn, a turn cut anywhere, one after a part of a shared history, or nearly the context."""
    turn, history = rng.choice(corpus.turns), rng.choice(corpus.histories)
    kind = rng.random()
    if kind < 0.5:
        return turn
    if kind < 0.65:
        return turn[: rng.randint(1, len(turn))]
    if kind < 0.93:
        return history[: rng.randint(1, corpus.context // 2)] + turn
    return history[: corpus.context - rng.randint(2, 40)]


def make_body(rng: random.Random, corpus: Corpus, input_ids: list[int]) -> Body:
    """A request with a random choice of features; most are greedy.

    A prompt near the context's end is answered until there (``max_new_tokens`` null).
    """
    length = rng.choice(LENGTHS)
    fits = len(input_ids) + length < corpus.context
    sampling: Body = {"temperature": 0, "max_new_tokens": length if fits else None}
    body: Body = {"input_ids": input_ids, "sampling_params": sampling}
    kind = rng.random()
    if kind < 0.2:
        sampling["temperature"] = rng.choice((0.3, 0.8, 1.2))
        if kind > SAMPLED_SHARE:
            sampling["top_k"] = 1
    for share, add in FEATURES:
        if rng.random() < share:
            add(rng, corpus.vocabulary, body)
    return body
