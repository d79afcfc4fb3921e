"""Make the test fixture: a tiny Qwen3 target and its JetSpec head, from seeds alone.

    python -m sglang_jetspec.tools.make_fixture --out tests/fixtures/tiny-qwen3

Takes a few minutes on two cores. The last line of stdout is one JSON object.
"""

import json
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from transformers import PreTrainedTokenizerFast

from sglang_jetspec.tools.fixture.conversations import conversation
from sglang_jetspec.tools.fixture.target import (
    MASK,
    build_target,
    save_target,
    train_target,
    train_tokenizer,
)
from sglang_jetspec.tools.regenerate import regenerate
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.data import Prompt
from sglang_jetspec.tools.train.generation import Generation
from sglang_jetspec.tools.train.run import run

BATCH = 64


@dataclass(frozen=True)
class FixtureConfig:
    """Sizes and seeds of the fixture."""

    out: Path
    """Folder for `target/` and `head/`."""
    target_steps: int = 450
    answers: int = 768
    answer_tokens: int = 192
    head_steps: int = 800
    seed: int = 0


def make_target(config: FixtureConfig) -> float:
    """Train and write `out/target`; returns its final training loss."""
    tokenizer = train_tokenizer(config.seed)
    model = build_target(tokenizer, config.seed)
    loss = train_target(model, tokenizer, config.target_steps, config.seed)
    save_target(model, tokenizer, config.out / "target")
    return loss


def write_answers(config: FixtureConfig, folder: Path) -> tuple[Path, Path]:
    """Prompts with corpus replies, and the target's own answers, half of them greedy.

    The others are drawn at temperature 0.7. End-of-turn is ignored, so the head also learns what
    follows it.
    """
    rng = random.Random(config.seed + 2)
    paths = folder / "prompts.jsonl", folder / "answers.jsonl"
    for temperature in (0.0, 0.7):
        turns = [conversation(rng) for _ in range(config.answers // 2)]
        prompts = [
            Prompt(f"fixture-{temperature}-{i}", (text,), source="fixture", replies=(reply,))
            for i, (text, reply) in enumerate(turns)
        ]
        rows = [{"id": p.id, "prompt": p.turns[0], "answer": p.replies[0]} for p in prompts]
        with paths[0].open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        generation = Generation(
            temperature=temperature,
            max_new_tokens=config.answer_tokens,
            batch_size=BATCH,
            ignore_eos=True,
            seed=config.seed,
        )
        regenerate(str(config.out / "target"), prompts, paths[1], generation)
    return paths


def make_head(config: FixtureConfig) -> dict[str, object]:
    """Train the head on the target's answers and write `out/head`."""
    with tempfile.TemporaryDirectory() as scratch:
        prompts, answers = write_answers(config, Path(scratch))
        tokenizer = PreTrainedTokenizerFast.from_pretrained(config.out / "target")
        summary = run(
            TrainConfig(
                target=str(config.out / "target"),
                prompts=prompts,
                answers=answers,
                out=Path(scratch) / "run",
                target_layer_ids=(0, 1, 2),
                draft_layers=2,
                block_size=17,
                mask_token_id=tokenizer.convert_tokens_to_ids(MASK),
                draft_vocab_size=None,
                steps=config.head_steps,
                sequences_per_step=8,
                anchors_per_sequence=16,
                learning_rate=3e-3,
                checkpoint_minutes=60.0,
                seed=config.seed,
            )
        )
        log = (Path(scratch) / "run" / "log.jsonl").read_text().splitlines()
        shutil.copytree(Path(scratch) / "run" / "head", config.out / "head", dirs_exist_ok=True)
    return {"steps": summary["steps"], **json.loads(log[-1])}


def main() -> None:
    """Make target and head; print sizes and final losses as one JSON line."""
    config = tyro.cli(FixtureConfig)
    loss = make_target(config)
    head = make_head(config)
    size = sum(path.stat().st_size for path in config.out.rglob("*") if path.is_file())
    print(json.dumps({"target_loss": loss, "head": head, "bytes": size}))


if __name__ == "__main__":
    main()
