"""What the end-to-end tests ask, the same of every server."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness import FIXTURE, Answer, Server, generate_all
from transformers import PreTrainedTokenizerFast

from sglang_jetspec.tools.fixture.conversations import conversation

CONTEXT = 512


@cache
def prompts(count: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Token ids of user turns the fixture was not trained on, ready to be answered."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FIXTURE / "target")
    rng = random.Random(10_000 + seed)
    turns = [[{"role": "user", "content": conversation(rng)[0]}] for _ in range(count)]
    return tuple(
        tuple(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))
        for turn in turns
    )


@cache
def long_prompts(lengths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """One prompt of each length: the ends of long runs of user turns."""
    ids = [token for prompt in prompts(300, seed=77) for token in prompt]
    assert len(ids) > 40 * len(lengths) + max(lengths)
    ends = [len(ids) - 40 * i for i in range(len(lengths))]
    return tuple(tuple(ids[end - n : end]) for end, n in zip(ends, lengths, strict=True))


@dataclass(frozen=True)
class Workload:
    """Prompts and how they are asked; ``batch`` requests are in flight at once."""

    prompts: Callable[[], tuple[tuple[int, ...], ...]]
    batch: int = 1
    sampling: dict[str, Any] = field(default_factory=dict)

    def ask(self, server: Server) -> list[Answer]:
        return generate_all(server, self.prompts(), self.batch, **self.sampling)


LIMIT_LENGTHS = tuple(CONTEXT - tail for tail in (7, 8, 9, 12, 17, 25, 40, 70))

WORKLOADS = {
    "single": Workload(lambda: prompts(40), 1, {"max_new_tokens": 64}),
    "batched": Workload(lambda: prompts(160, seed=1), 8, {"max_new_tokens": 64}),
    "lengths": Workload(lambda: prompts(18, seed=2), 6, {"max_new_tokens": 17, "ignore_eos": True}),
    "context_limit": Workload(
        lambda: long_prompts(LIMIT_LENGTHS), 8, {"max_new_tokens": None, "ignore_eos": True}
    ),
    "long": Workload(lambda: long_prompts((150, 300, 200, 410)), 4, {"max_new_tokens": 48}),
}


@dataclass(frozen=True)
class Texts:
    """Prompts as texts, asked at once."""

    prompts: Callable[[], list[str]]
    sampling: dict[str, Any]

    def ask(self, server: Server) -> list[Answer]:
        return list(server.generate(self.prompts(), **self.sampling))


def offline_prompts() -> list[str]:
    """Those of docs/examples/offline_engine.py."""
    script = Path(__file__).parents[2] / "docs" / "examples" / "offline_engine.py"
    return list(runpy.run_path(str(script), run_name="example")["PROMPTS"])


OFFLINE = {"offline": Texts(offline_prompts, {"max_new_tokens": 48, "ignore_eos": True})}
