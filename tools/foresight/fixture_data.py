r"""Data for foresight experiments on the test fixture's tiny target, from seeds alone.

    python -m sglang_jetspec.tools.foresight.fixture_data --fixture tests/fixtures/tiny-qwen3 \
        --out DIR

Writes `prompts.jsonl` and `answers.jsonl` to train on, and `calibration.jsonl` and
`evaluation.jsonl`, other prompts.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

from sglang_jetspec.tools.fixture.conversations import conversation
from sglang_jetspec.tools.train.data import read_jsonl


@dataclass(frozen=True)
class FixtureDataConfig:
    """Sizes and place of the data."""

    fixture: Path
    """Folder with `target/`."""
    out: Path
    answers: int = 1024
    prompts: int = 192
    """Prompts for calibration, and as many for evaluation."""


def write_prompts(path: Path, count: int, seed: int, taken: set[str]) -> None:
    """`count` questions of the fixture's conversations that are not `taken`, which they join."""
    rng, texts = random.Random(seed), list[str]()
    while len(texts) < count:
        text = conversation(rng)[0]
        if text not in taken:
            texts.append(text)
            taken.add(text)
    rows = [
        {"id": f"{path.stem}-{i}", "task": path.stem, "turns": [text]}
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write all files."""
    config = tyro.cli(FixtureDataConfig)
    from sglang_jetspec.tools.make_fixture import FixtureConfig, write_answers

    config.out.mkdir(parents=True, exist_ok=True)
    prompts, _ = write_answers(
        FixtureConfig(out=config.fixture, answers=config.answers), config.out
    )
    taken = {str(row["prompt"]) for row in read_jsonl(prompts)}
    for seed, name in ((101, "calibration"), (102, "evaluation")):
        write_prompts(config.out / f"{name}.jsonl", config.prompts, seed, taken)


if __name__ == "__main__":
    main()
