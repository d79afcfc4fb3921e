"""A target's own answers to prompts, through SGLang's engine: batched, any device it serves on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import sglang
import torch
from transformers import AutoTokenizer

from sglang_jetspec.tools.train.data import Answer, Prompt, next_turn
from sglang_jetspec.tools.train.generation import Generation

HOST_POOL_TOKENS = 65536  # SGLang would fill the host's memory; short of KV, requests wait
Answers = dict[tuple[str, int], Answer]
QUEUED_PER_SLOT = 2  # conversations in flight for each running request, so that none idles


class TargetEngine:
    """An offline SGLang engine of `target`; use it as a context manager.

    Raises ValueError for engine arguments that are no JSON object.
    """

    def __init__(self, target: str, generation: Generation) -> None:
        self._generation = generation
        self._tokenizer = AutoTokenizer.from_pretrained(target)
        self._engine = sglang.Engine(**engine_arguments(target, generation))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.shutdown()

    def answer(
        self,
        prompts: Iterable[Prompt],
        known: Answers,
        on_answer: Callable[[Prompt, int, Answer], None],
    ) -> None:
        """Answer every turn of `prompts` that `known` (by id and turn) does not hold; add it there.

        `on_answer` gets (prompt, turn, answer) as soon as the answer is there, in the order of
        completion. Later turns are asked with the answers to the earlier ones before them.
        """
        pending = iter(prompts)

        async def work() -> None:
            for prompt in pending:  # shared: each prompt goes to one worker
                while asked := self._next(prompt, known):
                    turn, ids = asked
                    answer = await self._generate(ids)
                    known[prompt.id, turn] = answer
                    on_answer(prompt, turn, answer)

        async def all_workers() -> None:
            workers = QUEUED_PER_SLOT * self._generation.batch_size
            await asyncio.gather(*(work() for _ in range(workers)))

        self._engine.loop.run_until_complete(all_workers())

    def _next(self, prompt: Prompt, known: Answers) -> tuple[int, list[int]] | None:
        return next_turn(prompt, known, self._tokenizer, self._generation.max_prompt_tokens)

    async def _generate(self, ids: Sequence[int]) -> Answer:
        decoding = self._generation
        output: Any = await self._engine.async_generate(
            input_ids=list(ids),
            sampling_params={
                "temperature": decoding.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": decoding.max_new_tokens,
                "ignore_eos": decoding.ignore_eos,
            },
        )
        finished = output["meta_info"]["finish_reason"]["type"] == "stop"
        return Answer(output["output_ids"], finished)


def engine_arguments(target: str, generation: Generation) -> dict[str, Any]:
    """Arguments of `sglang.Engine`; on a host without accelerator with a bounded KV pool."""
    try:
        given = msgspec.json.decode(generation.engine, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"--generation.engine is {generation.engine!r} ({error}); give a JSON object"
        ) from error
    arguments: dict[str, Any] = {
        "model_path": target,
        "max_running_requests": generation.batch_size,
        "random_seed": generation.seed,
        "skip_tokenizer_init": True,
    }
    if not torch.cuda.is_available():
        longest = generation.max_prompt_tokens + generation.max_new_tokens + 1
        wanted = (generation.batch_size + 1) * longest
        arguments["device"] = "cpu"
        arguments["max_total_tokens"] = max(min(wanted, HOST_POOL_TOKENS), 2 * longest)
    return arguments | given
