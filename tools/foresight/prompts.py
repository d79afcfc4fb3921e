"""Prompt files as token ids."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sglang_jetspec.tools.train.data import chat_token_ids, read_prompts


def read_prompt_ids(path: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Chat-templated ids of the first turns of the first `count` prompts."""
    prompts = read_prompts(path)[:count]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return [chat_token_ids(tokenizer, prompt) for prompt in prompts]
