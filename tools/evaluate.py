"""Acceptance length of a draft head by prompt set and tree budget, from greedy answers.

    python -m sglang_jetspec.tools.evaluate --target DIR --head DIR --data DIR

`--data` holds one `<set>.jsonl` a set with rows `{id, turns}`; the first turn is the prompt. The
target's answers and features are kept under --cache and reused for other heads. Prints a table,
then one JSON line.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.regenerate import regenerate
from sglang_jetspec.tools.train.acceptance import TreeShape, acceptance_lengths
from sglang_jetspec.tools.train.data import Prompt, load_examples, read_prompts
from sglang_jetspec.tools.train.features import capture_features
from sglang_jetspec.tools.train.generation import Generation
from sglang_jetspec.tools.train.target import freeze, load_target

LONGEST = 4096  # tokens of a prompt or of a whole conversation


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure the committed tokens a round of a head."""

    target: str
    head: Path
    data: Path
    """Folder with one `<set>.jsonl` a prompt set."""
    cache: Path
    """Folder for one target's answers and features; keep it outside the repository."""
    sets: tuple[str, ...] = ("gsm8k", "humaneval", "mt_bench")
    prompts: int = 24
    """Prompts a set, from the start of its file."""
    max_new_tokens: int = 192
    budgets: tuple[int, ...] = field(default=(8, 16, 32, 64))
    """Tree budgets, root included; the chain of the head's depth comes first."""
    width: int = 8
    batch_size: int = 24
    engine: str = "{}"
    """JSON object of further `sglang.Engine` arguments."""


def evaluate(config: EvaluateConfig) -> dict[str, dict[str, float]]:
    """Acceptance length (committed tokens a round, bonus included) by set and tree."""
    head, draft_token_ids = load_reference_head(config.head)
    answer_sets(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(config.target, device)
    target, head = freeze(model, draft_token_ids), head.to(device)
    shapes = [TreeShape(head.config.max_depth + 1, 1)]
    shapes += [TreeShape(nodes, config.width) for nodes in config.budgets]
    results: dict[str, dict[str, float]] = {}
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    taps = head.config.target_layer_ids
    for name in config.sets:
        prompts = first_turns(config, name)
        examples = load_examples(prompts, answers_path(config, name), tokenizer, LONGEST)
        folder = config.cache / f"{set_key(config, name)}-features-{'-'.join(map(str, taps))}"
        store = capture_features(model, taps, examples, folder)
        indices = tqdm(range(len(examples)), desc=f"Drafting {name}", unit="answer")
        results[name] = acceptance_lengths(head, target, draft_token_ids, store, indices, shapes)
    return results


def first_turns(config: EvaluateConfig, name: str) -> list[Prompt]:
    """The first turn of the first prompts of a set."""
    prompts = read_prompts(config.data / f"{name}.jsonl")[: config.prompts]
    return [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]


def set_key(config: EvaluateConfig, name: str) -> str:
    """What the cached answers of a set depend on besides the target."""
    return f"{name}-{config.prompts}x{config.max_new_tokens}"


def answers_path(config: EvaluateConfig, name: str) -> Path:
    """Where the target's greedy answers to a set are kept."""
    return config.cache / f"{set_key(config, name)}.jsonl"


def answer_sets(config: EvaluateConfig) -> None:
    """Let the target answer, greedily, what the cache does not hold."""
    generation = Generation(
        max_new_tokens=config.max_new_tokens,
        max_prompt_tokens=LONGEST,
        batch_size=config.batch_size,
        engine=config.engine,
    )
    for name in config.sets:
        regenerate(config.target, first_turns(config, name), answers_path(config, name), generation)


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
