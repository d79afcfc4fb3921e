"""Let a target answer training prompts itself; a head learns from such answers only.

    python -m sglang_jetspec.tools.regenerate --target DIR --prompts FILE --out FILE

Reads JSON lines `{id, source, license, prompt}`, appends `{id, source, license, temperature,
finished, answer_ids}`. Prompts already answered in --out are left out, so it can be interrupted.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_jetspec.tools.train.answers import Decoding, answer_prompts
from sglang_jetspec.tools.train.data import OPEN_LICENSES, prompt_token_ids, read_jsonl


@dataclass(frozen=True)
class RegenerateConfig:
    """Answer training prompts with the target."""

    target: Path
    """Hugging Face folder of the target."""
    prompts: Path
    """JSON lines with `id`, `source`, `license`, `prompt`."""
    out: Path
    """JSON lines to append answers to."""
    temperature: float = 0.0
    max_new_tokens: int = 256
    max_prompt_tokens: int = 400
    """Longer prompts are left out."""
    limit: int | None = None
    """Answer at most this many prompts."""
    batch_size: int = 64
    seed: int = 0
    licenses: tuple[str, ...] = OPEN_LICENSES


def regenerate(config: RegenerateConfig) -> int:
    """Append answers to `config.out`; returns how many."""
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    rows = _open_rows(config, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.bfloat16).eval()
    torch.manual_seed(config.seed)
    decoding = Decoding(config.max_new_tokens, config.temperature)
    answers = answer_prompts(
        model, tokenizer, [row["prompt"] for row in rows], decoding, config.batch_size
    )
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with config.out.open("a", encoding="utf-8") as file:
        for index, answer in tqdm(answers, total=len(rows), desc="Answering", unit="prompt"):
            row = {key: rows[index][key] for key in ("id", "source", "license")}
            row |= {"temperature": config.temperature, "finished": answer.finished}
            file.write(json.dumps(row | {"answer_ids": answer.ids}) + "\n")
    return len(rows)


def _open_rows(config: RegenerateConfig, tokenizer: Any) -> list[dict[str, Any]]:
    done = {row["id"] for row in read_jsonl(config.out)} if config.out.exists() else set()
    rows = [
        row
        for row in read_jsonl(config.prompts)
        if row["id"] not in done
        and row["license"] in config.licenses
        and len(prompt_token_ids(tokenizer, row["prompt"])) <= config.max_prompt_tokens
    ]
    return rows[: config.limit]


def main() -> None:
    """Answer and print the number of new rows as one JSON line."""
    config = tyro.cli(RegenerateConfig)
    print(json.dumps({"answers": regenerate(config), "out": str(config.out)}))


if __name__ == "__main__":
    main()
