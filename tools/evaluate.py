"""Acceptance length of draft heads by prompt set, tree and budget, from greedy answers.

    python -m sglang_jetspec.tools.evaluate --target DIR --head DIR [DIR ...] --data DIR

`--data` holds one `<set>.jsonl` a set with rows `{id, turns}`; the first turn is the prompt. The
target's answers and features are kept under --cache and reused for other heads. Prints a table a
head with 95 % intervals, bootstrapped over answers, and one of ratios with --against; then one JSON
line.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.acceptance_plot import plot_acceptance
from sglang_jetspec.tools.intervals import Interval, Rounds, mean_interval, ratio_interval
from sglang_jetspec.tools.regenerate import regenerate
from sglang_jetspec.tools.train.acceptance import TreeShape, check_sequential, rounds_by_answer
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
    against: tuple[Path, str] | None = None
    """A head and one of its trees, such as `runs/dflash/head chain7`; every other is also told as a
    multiple of it, answer by answer."""
    plot: Path | None = None
    """Picture of acceptance length over budget, PNG or SVG."""


# By head, set and tree.
Measured = dict[str, dict[str, dict[str, Rounds]]]
Intervals = dict[str, dict[str, dict[str, Interval]]]


def evaluate(config: EvaluateConfig) -> Measured:
    """Committed tokens (bonus included) of every round of every answer.

    Raises, before the target answers anything, HeadError for a head that cannot be read and
    ValueError for a kind of tree that does not exist or does not suit a head, or for a baseline
    that is not measured.
    """
    heads = {str(folder): load_reference_head(folder) for folder in config.head}
    shapes = {name: tree_shapes(config, head.config) for name, (head, _) in heads.items()}
    check_baseline(config, shapes)
    answer_sets(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_target(config.target, device)
    tokenizer = AutoTokenizer.from_pretrained(config.target)
    targets = {name: freeze(model, ids) for name, (_, ids) in heads.items()}
    results: Measured = {name: {} for name in heads}
    for task in config.sets:
        answers = answers_path(config, task)
        examples = load_examples(first_turns(config, task), answers, tokenizer, LONGEST)
        for name, (head, draft_token_ids) in heads.items():
            taps = head.config.target_layer_ids
            kept = config.cache / f"{set_key(config, task)}-features-{'-'.join(map(str, taps))}"
            store = capture_features(model, taps, examples, kept)
            indices = tqdm(range(len(examples)), desc=f"Drafting {task}", unit="answer")
            results[name][task] = rounds_by_answer(
                head.to(device), targets[name], draft_token_ids, store, indices, shapes[name]
            )
    return results


def check_baseline(config: EvaluateConfig, shapes: dict[str, list[TreeShape]]) -> None:
    """ValueError unless `against` names a head and a tree that are measured."""
    if config.against is None:
        return
    head, tree = str(config.against[0]), config.against[1]
    if head not in shapes:
        raise ValueError(f"--against {head} is not among the heads: {', '.join(shapes)}")
    labels = [shape.label for shape in shapes[head]]
    if tree not in labels:
        raise ValueError(f"--against {head} {tree!r}: its trees are {', '.join(labels)}")


def lengths(results: Measured) -> Intervals:
    """Acceptance length."""
    return map_rounds(results, lambda _, rounds: mean_interval(rounds))


def ratios(results: Measured, head: str, tree: str) -> Intervals:
    """Acceptance length as a multiple of that of `tree` of `head`."""
    return map_rounds(results, lambda s, rounds: ratio_interval(rounds, results[head][s][tree]))


def map_rounds(results: Measured, interval: Callable[[str, Rounds], Interval]) -> Intervals:
    """`interval` of every set's rounds."""
    return {
        head: {
            name: {tree: interval(name, rounds) for tree, rounds in trees.items()}
            for name, trees in sets.items()
        }
        for head, sets in results.items()
    }


def tree_shapes(config: EvaluateConfig, head: HeadConfig) -> list[TreeShape]:
    """The chain of the head's depth, then every kind of tree at every budget."""
    shapes = [TreeShape(head.max_depth + 1, 1)]
    for text in config.trees:
        builder = read_tree(text)
        if head.correction is not None:
            check_sequential(head, builder)
        label = "tree" if text == "best_first" else f"{text}-"
        shapes += [TreeShape(nodes, config.width, builder, label) for nodes in config.budgets]
    return shapes


def read_tree(text: str) -> TreeBuilder:
    """The builder that `KIND` or `KIND:{options}` names."""
    kind, _, options = text.partition(":")
    try:
        values = json.loads(options or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--trees {text!r}: its options are no JSON object ({error})") from error
    builder = tree_builder(TREE_BUILDERS, kind, values)
    if builder.max_width is not None:
        raise ValueError(f"--trees {text!r}: the chain is measured in any case; leave it out")
    return builder


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


def print_tables(found: Intervals, what: str) -> None:
    """A table a head."""
    console = Console(stderr=True)
    for head, by_set in found.items():
        table = Table("tree", *by_set, title=f"{what}: {head}")
        for label in next(iter(by_set.values())):
            table.add_row(label, *(str(values[label]) for values in by_set.values()))
        console.print(table)


def main() -> None:
    """Evaluate; print tables and one JSON line."""
    config = tyro.cli(EvaluateConfig)
    results = evaluate(config)
    found = lengths(results)
    print_tables(found, "Committed tokens a round, greedy")
    line = {"acceptance_length": found}
    if config.plot is not None:
        plot_acceptance(found, config.plot)
    if config.against is not None:
        head, tree = str(config.against[0]), config.against[1]
        line["ratio"] = ratios(results, head, tree)
        print_tables(line["ratio"], f"Multiples of {head}, {tree}")
    print(json.dumps(line, default=vars))


if __name__ == "__main__":
    main()
