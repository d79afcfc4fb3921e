"""A target's own answers to prompts: batched generation with transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sglang_jetspec.tools.train.data import prompt_token_ids


@dataclass(frozen=True)
class Decoding:
    """How to answer; temperature 0 is greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    ignore_eos: bool = False


@dataclass(frozen=True)
class Answer:
    """`finished` tells whether `ids` ended by itself, its end-of-turn token included."""

    ids: list[int]
    finished: bool


def answer_prompts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    decoding: Decoding,
    batch_size: int,
) -> Iterator[tuple[int, Answer]]:
    """Yield (index of the prompt, its answer), shortest prompts first."""
    encoded = [prompt_token_ids(tokenizer, prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        answers = _answer_batch(model, tokenizer, [encoded[i] for i in batch], decoding)
        yield from zip(batch, answers, strict=True)


@torch.inference_mode()
def _answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    decoding: Decoding,
) -> list[Answer]:
    width = max(map(len, prompts))
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    padding = torch.tensor([width - len(prompt) for prompt in prompts])
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    sampling = {"do_sample": False}
    if decoding.temperature > 0:
        sampling = {"do_sample": True, "temperature": decoding.temperature, "top_k": 0}
    output = model.generate(
        input_ids=ids,
        attention_mask=(torch.arange(width) >= padding[:, None]).long(),
        max_new_tokens=decoding.max_new_tokens,
        eos_token_id=None if decoding.ignore_eos else eos,
        pad_token_id=pad,
        **sampling,
    )
    return [_cut(row, None if decoding.ignore_eos else eos) for row in output[:, width:].tolist()]


def _cut(ids: list[int], eos: int | None) -> Answer:
    if eos is None or eos not in ids:
        return Answer(ids, finished=False)
    return Answer(ids[: ids.index(eos) + 1], finished=True)
