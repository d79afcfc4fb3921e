"""One pass of all prompts through one running server, as raw samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from sglang_jetspec.tools.bench.prompts import Prompt
from sglang_jetspec.tools.bench.server import Server

WARM_UP_PROMPTS = 2
WARM_UP_TOKENS = 16


class Sample(msgspec.Struct, frozen=True):
    """One answer. Times in seconds."""

    arm: str
    repeat: int
    task: str
    id: str
    prompt_tokens: int
    output_ids: list[int]
    latency_s: float  # from sending the request to having the answer
    decode_s: float | None  # from the first token to the last, by the server's clock
    verify_rounds: int | None  # None: the server does not speculate
    finish_reason: str


class Pass(msgspec.Struct, frozen=True):
    """All samples of one arm, repeat and task, and the wall time they took together."""

    arm: str
    repeat: int
    task: str
    wall_s: float
    samples: list[Sample]


def warm_up(server: Server, prompts: Sequence[Prompt]) -> None:
    """Lets allocators and lazy set-up settle, then empties the prefix cache."""
    for prompt in prompts[:WARM_UP_PROMPTS]:
        server.generate(prompt.input_ids, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
    server.post("/flush_cache?timeout=30", {}).raise_for_status()


def run_pass(
    server: Server,
    arm: str,
    repeat: int,
    prompts: Sequence[Prompt],
    *,
    batch: int,
    max_tokens: int,
    ignore_eos: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Pass:
    """Asks all prompts of one task greedily, `batch` of them at a time (closed loop)."""

    def ask(prompt: Prompt) -> Sample:
        start = time.perf_counter()
        answer = server.generate(prompt.input_ids, max_new_tokens=max_tokens, ignore_eos=ignore_eos)
        latency = time.perf_counter() - start
        advance()
        return to_sample(arm, repeat, prompt, answer, latency)

    start = time.perf_counter()
    pool = ThreadPoolExecutor(batch)
    try:
        samples = list(pool.map(ask, prompts))
    finally:  # after an error or an interrupt, do not wait for what is still queued
        pool.shutdown(wait=False, cancel_futures=True)
    return Pass(arm, repeat, prompts[0].task, time.perf_counter() - start, samples)


def to_sample(
    arm: str, repeat: int, prompt: Prompt, answer: dict[str, Any], latency_s: float
) -> Sample:
    meta = answer["meta_info"]
    begin, end = meta.get("prefill_finished_time"), meta.get("request_finished_ts")
    return Sample(
        arm=arm,
        repeat=repeat,
        task=prompt.task,
        id=prompt.id,
        prompt_tokens=meta["prompt_tokens"],
        output_ids=answer["output_ids"],
        latency_s=latency_s,
        decode_s=end - begin if begin and end else None,
        verify_rounds=meta.get("spec_verify_ct"),
        finish_reason=meta["finish_reason"]["type"],
    )
