"""What the end-to-end tests ask, the same of every server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from harness import FIXTURE, Answer, Server, generate_all
from sglang_jetspec.tools.make_fixture import sample_texts
from tokenizers import Tokenizer

CONTEXT = 512


@cache
def prompts(count: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Token ids of the beginnings of texts the fixture was not trained on, 8 to 60 tokens."""
    tokenizer = Tokenizer.from_file(str(FIXTURE / "target" / "tokenizer.json"))
    texts = sample_texts(count, seed=10_000 + seed)
    encoded = [tokenizer.encode(text).ids for text in texts]
    return tuple(tuple(ids[: 8 + (7 * i) % 53]) for i, ids in enumerate(encoded))


@cache
def long_prompts(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """One prompt of each length, made of fixture texts."""
    tokenizer = Tokenizer.from_file(str(FIXTURE / "target" / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(sample_texts(400, seed=77))).ids
    assert len(ids) > 10 * len(lengths) + max(lengths)
    return tuple(tuple(ids[10 * i : 10 * i + n]) for i, n in enumerate(lengths))


@dataclass(frozen=True)
class Workload:
    """Prompts and how they are asked; ``batch`` requests are in flight at once."""

    prompts: Callable[[], tuple[tuple[int, ...], ...]]
    batch: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)

    def ask(self, server: Server) -> list[Answer]:
        return generate_all(server, self.prompts(), self.batch, **self.sampling)


LIMIT_LENGTHS = tuple(CONTEXT - tail for tail in (3, 4, 5, 8, 12, 17, 40, 70))

WORKLOADS = {
    "single": Workload(lambda: prompts(40), 1, {"max_new_tokens": 64}),
    "batched": Workload(lambda: prompts(160, seed=1), 8, {"max_new_tokens": 64}),
    "lengths": Workload(lambda: prompts(18, seed=2), 6, {"max_new_tokens": 17, "ignore_eos": True}),
    "context_limit": Workload(
        lambda: long_prompts(LIMIT_LENGTHS), 8, {"max_new_tokens": CONTEXT, "ignore_eos": True}
    ),
    "long": Workload(lambda: long_prompts((150, 300, 200, 410)), 4, {"max_new_tokens": 48}),
}
