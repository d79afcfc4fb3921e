"""Seeded random requests, asked of the server without speculation and of JETSPEC."""

from __future__ import annotations

from functools import cache
from typing import Any

from harness import FIXTURE, Server
from transformers import PreTrainedTokenizerFast
from workloads import CONTEXT

from sglang_jetspec.tools.fuzz.answers import ask
from sglang_jetspec.tools.fuzz.cases import Corpus, Group, make_groups

SEED, REQUESTS = 2026, 200


@cache
def groups() -> list[Group]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FIXTURE / "target")
    return make_groups(Corpus.of(tokenizer, SEED, CONTEXT), SEED, REQUESTS)


def ask_all(server: Server) -> list[Any]:
    return [ask(server, group) for group in groups()]
