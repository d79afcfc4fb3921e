"""Acceptance length of draft heads by prompt set, tree and budget, from greedy answers.

    python -m sglang_jetspec.tools.evaluate --target DIR --head DIR [DIR ...] --data DIR

`--data` holds one `<set>.jsonl` a set with rows `{id, turns}`; the first turn is the prompt. The
target's answers and features are kept under --cache and reused for other heads. Prints a table a
head with 95 % intervals, bootstrapped over answers, then one JSON line.
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
from sglang_jetspec.tools.intervals import Interval, mean_interval
from sglang_jetspec.tools.regenerate import regenerate
from sglang_jetspec.tools.train.acceptance import TreeShape, rounds_by_answer
from sglang_jetspec.tools.train.data import Prompt, load_examples, read_prompts
from sglang_jetspec.tools.train.features import capture_features
from sglang_jetspec.tools.train.generation import Generation
from sglang_jetspec.tools.train.target import freeze, load_target
from sglang_jetspec.trees import TREE_BUILDERS, TreeBuilder, tree_builder

LONGEST = 4096  # tokens of a prompt or of a whole conversation


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure the committed tokens a round of heads."""

    target: str
    head: tuple[Path, ...]
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
    trees: tuple[str, ...] = ("best_first",)
    """Kinds of trees, with options as JSON behind a colon: `hybrid:{"alpha": -0.5}`."""
    batch_size: int = 24
    engine: str = "{}"
    """JSON object of further `sglang.Engine` arguments."""


def evaluate(config: EvaluateConfig) -> dict[str, dict[str, dict[str, Interval]]]:
    """Acceptance length (committed tokens a round, bonus included) by head, set and tree.

    Raises ValueError for a kind of tree that does not exist or does not suit a head.
    """
    builders = {name: read_tree(name) for name in config.trees}
    answer_sets(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(config.target, device)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    results: dict[str, dict[str, dict[str, Interval]]] = {}
    for folder in config.head:
        reference, draft_token_ids = load_reference_head(folder)
        target, head = freeze(model, draft_token_ids), reference.to(device)
        shapes = [TreeShape(head.config.max_depth + 1, 1)]
        for name, builder in builders.items():
            label = "tree" if name == "best_first" else f"{name}-"
            shapes += [TreeShape(nodes, config.width, builder, label) for nodes in config.budgets]
        taps, by_set = head.config.target_layer_ids, results.setdefault(str(folder), {})
        for name in config.sets:
            examples = load_examples(
                first_turns(config, name), answers_path(config, name), tokenizer, LONGEST
            )
            kept = config.cache / f"{set_key(config, name)}-features-{'-'.join(map(str, taps))}"
            store = capture_features(model, taps, examples, kept)
            indices = tqdm(range(len(examples)), desc=f"Drafting {name}", unit="answer")
            rounds = rounds_by_answer(head, target, draft_token_ids, store, indices, shapes)
            by_set[name] = {label: mean_interval(answers) for label, answers in rounds.items()}
    return results


def read_tree(text: str) -> TreeBuilder:
    """The builder that `KIND` or `KIND:{options}` names."""
    kind, _, options = text.partition(":")
    try:
        values = json.loads(options or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--trees {text!r}: its options are no JSON object ({error})") from error
    return tree_builder(TREE_BUILDERS, kind, values)


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
    """Evaluate; print a table a head and one JSON line."""
    config = tyro.cli(EvaluateConfig)
    results = evaluate(config)
    console = Console(stderr=True)
    for head, by_set in results.items():
        labels = list(next(iter(by_set.values())))
        table = Table("tree", *by_set, title=f"Committed tokens a round, greedy: {head}")
        for label in labels:
            table.add_row(label, *(str(values[label]) for values in by_set.values()))
        console.print(table)
    plain = {
        h: {s: {t: vars(i) for t, i in v.items()} for s, v in b.items()} for h, b in results.items()
    }
    print(json.dumps({"acceptance_length": plain}))


if __name__ == "__main__":
    main()
