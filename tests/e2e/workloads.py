"""What the end-to-end tests ask, the same of every server."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import FIXTURE, Answer, Server, generate_all
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from sglang_jetspec.tools.fixture.conversations import conversation

CONTEXT = 512
EOS = 2
# Larger counts for a run by hand; the suite's own are sized for a small machine.
SCALE = int(os.environ.get("JETSPEC_E2E_SCALE", "1"))


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


def changed_target(folder: Path) -> Path:
    """The fixture's target with noise on its weights: still fluent, in other words."""
    shutil.copytree(FIXTURE / "target", folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    random_source = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=random_source)
        weights[name] = (tensor + 0.08 * tensor.float().std() * noise).to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def use_target(server: Server, folder: Path) -> None:
    """Loads a folder's weights into a running server."""
    answer = server.post("/update_weights_from_disk", {"model_path": str(folder)})
    assert answer.status_code == 200, answer.text


def acceptance_length(answers: list[Answer]) -> float:
    """Tokens a round, over all answers."""
    metas = [answer["meta_info"] for answer in answers]
    tokens = sum(meta["completion_tokens"] for meta in metas)
    return tokens / sum(meta["spec_verify_ct"] for meta in metas)
