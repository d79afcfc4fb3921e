"""Acceptance length of a draft head by prompt set and tree budget, from greedy answers.

    python -m sglang_jetspec.tools.evaluate --target DIR --head DIR --data DIR

`--data` holds one `<set>.jsonl` a set with rows `{id, turns}`; the first turn is the prompt. The
target's answers and features are kept under --cache and reused for other heads. Prints a table,
then one JSON line.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.train.acceptance import (
    TreeShape,
    committed_per_round,
    draft_everywhere,
)
from sglang_jetspec.tools.train.answers import Decoding, answer_prompts
from sglang_jetspec.tools.train.data import Example, prompt_token_ids, read_jsonl
from sglang_jetspec.tools.train.features import FeatureStore, capture_features
from sglang_jetspec.tools.train.target import freeze


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure the committed tokens a round of a head."""

    target: Path
    head: Path
    data: Path
    """Folder with one `<set>.jsonl` a prompt set."""
    cache: Path
    """Folder for answers and features; keep it outside the repository."""
    sets: tuple[str, ...] = ("gsm8k", "humaneval", "mt_bench")
    prompts: int = 24
    """Prompts a set, from the start of its file."""
    max_new_tokens: int = 192
    budgets: tuple[int, ...] = field(default=(8, 16, 32, 64))
    """Tree budgets, root included; the chain of the head's depth comes first."""
    width: int = 8
    batch_size: int = 24


def evaluate(config: EvaluateConfig) -> dict[str, dict[str, float]]:
    """Acceptance length (committed tokens a round, bonus included) by set and tree."""
    head, draft_token_ids = load_reference_head(config.head)
    model = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.bfloat16).eval()
    target = freeze(model, draft_token_ids)
    shapes = [TreeShape(head.config.block_size, 1)]
    shapes += [TreeShape(nodes, config.width) for nodes in config.budgets]
    results: dict[str, dict[str, float]] = {}
    for name in config.sets:
        store = greedy_store(config, name, model, head.config.target_layer_ids)
        rounds: dict[str, list[int]] = {shape.label: [] for shape in shapes}
        for index, example in enumerate(tqdm(store.examples, desc=f"Drafting {name}")):
            if len(example.token_ids) - example.prompt_length < 2:
                continue
            drafts = draft_everywhere(head, target, draft_token_ids, store, index, config.width)
            for shape in shapes:
                rounds[shape.label] += committed_per_round(
                    drafts, example.token_ids, example.finished, shape
                )
        results[name] = {label: sum(r) / max(len(r), 1) for label, r in rounds.items()}
    return results


def greedy_store(
    config: EvaluateConfig, name: str, model: torch.nn.Module, taps: tuple[int, ...]
) -> FeatureStore:
    """Greedy answers of one set and their features, from the cache when it has them."""
    key = f"{name}-{config.prompts}x{config.max_new_tokens}"
    answers = config.cache / f"{key}.jsonl"
    if not answers.exists():
        _write_answers(config, name, model, answers)
    examples = [Example(**row) for row in read_jsonl(answers)]
    folder = config.cache / f"{key}-features-{'-'.join(map(str, taps))}"
    return capture_features(config.target, taps, examples, folder)


def _write_answers(config: EvaluateConfig, name: str, model: torch.nn.Module, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    rows = list(read_jsonl(config.data / f"{name}.jsonl"))[: config.prompts]
    texts = [row["turns"][0] for row in rows]
    answers = answer_prompts(
        model, tokenizer, texts, Decoding(config.max_new_tokens), config.batch_size
    )
    lines = []
    for index, answer in tqdm(answers, total=len(texts), desc=f"Answering {name}", unit="prompt"):
        prompt = prompt_token_ids(tokenizer, texts[index])
        row = {"id": rows[index]["id"], "source": name, "token_ids": prompt + answer.ids}
        row |= {"prompt_length": len(prompt), "finished": answer.finished}
        lines.append(json.dumps(row))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Evaluate; print a table and one JSON line."""
    config = tyro.cli(EvaluateConfig)
    results = evaluate(config)
    labels = list(next(iter(results.values())))
    table = Table("set", *labels, title="Committed tokens a round, greedy")
    for name, values in results.items():
        table.add_row(name, *(f"{values[label]:.2f}" for label in labels))
    Console(stderr=True).print(table)
    print(json.dumps({"head": str(config.head), "acceptance_length": results}))


if __name__ == "__main__":
    main()
