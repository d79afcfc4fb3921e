"""Prompt files as token ids."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sglang_jetspec.tools.train.data import prompt_token_ids, read_jsonl


def read_prompt_ids(path: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Chat-templated ids of the first `count` prompts (`prompt`, or the first of `turns`)."""
    texts = [row.get("prompt") or row["turns"][0] for row in read_jsonl(path)][:count]
    if not texts:
        raise ValueError(f"{path} holds no prompts")
    return [prompt_token_ids(tokenizer, text) for text in texts]
