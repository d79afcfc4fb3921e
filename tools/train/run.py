"""`jetspec train`: from answers to an exported head.

    python -m sglang_jetspec.tools.train.run --target DIR --prompts FILE --answers FILE --out DIR

Running it again with the same --out resumes. The head is exported to `OUT/head`; the last line of
stdout is one JSON object.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import tyro
from transformers import AutoConfig, AutoTokenizer

from sglang_jetspec.heads.format import parse_head_config
from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.batches import Batch, BatchSource, pick_examples
from sglang_jetspec.tools.train.block_inputs import block_inputs
from sglang_jetspec.tools.train.checkpoint import list_checkpoints
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.data import Example, draft_vocabulary, is_held_out, load_examples
from sglang_jetspec.tools.train.export import export_checkpoint, export_details, raw_config
from sglang_jetspec.tools.train.features import FeatureStore, capture_features
from sglang_jetspec.tools.train.loop import train
from sglang_jetspec.tools.train.target import (
    FrozenTarget,
    freeze,
    head_config,
    initial_head,
    load_target,
    tap_scales,
)

TAP_SAMPLE = 2048
HELD_OUT_BATCHES = 8


class TrainingRun:
    """Everything a run derives from its configuration, before the first step."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        check_config(config)
        tokenizer = AutoTokenizer.from_pretrained(config.target)
        examples = load_examples(config.prompts, config.answers, tokenizer, config.licenses)
        if any(config.mask_token_id in example.token_ids for example in examples):
            raise ValueError(
                f"--mask-token-id is {config.mask_token_id}, which occurs in the training text; "
                f"give an unused token of the target"
            )
        self.store: FeatureStore = capture_features(
            config.target,
            config.target_layer_ids,
            examples,
            config.out / "features",
            config.device,
        )
        held_out = [is_held_out(example.id, config.held_out_share) for example in examples]
        self.train_rows = [i for i, held in enumerate(held_out) if not held]
        self.held_out_rows = [i for i, held in enumerate(held_out) if held]
        self.draft_token_ids = _draft_token_ids(
            config, [examples[i] for i in self.train_rows], tokenizer.eos_token_id
        )
        torch.manual_seed(config.seed)
        sample = self.store.taps[torch.randint(self.store.offsets[-1], (TAP_SAMPLE,))]
        self.scales = tap_scales(sample)
        self.target, self.head = self._models(sample)
        inputs = block_inputs(self.head.config, config.noised_share)
        self.source = BatchSource(self.store, self.scales, config.block_size, inputs)

    def batch_at(self, step: int) -> Batch:
        """The training batch of `step`."""
        return self._batch(self.train_rows, self.config.seed, step, self.source)

    def held_out_batches(self) -> list[Batch]:
        """A fixed sample of held-out blocks, filled as in the first pass of drafting."""
        steps = min(HELD_OUT_BATCHES, len(self.held_out_rows) // self.config.sequences_per_step)
        source = replace(self.source, inputs=block_inputs(self.head.config))
        return [self._batch(self.held_out_rows, 0, step, source) for step in range(steps)]

    def export_details(self) -> dict[str, Any]:
        """What checkpoints need besides weights to be exported."""
        return export_details(self.head.config, self.scales, self.draft_token_ids)

    def _batch(self, rows: list[int], seed: int, step: int, source: BatchSource) -> Batch:
        lengths = [len(example.token_ids) for example in self.store.examples]
        picked = pick_examples(rows, lengths, self.config.sequences_per_step, seed, step)
        anchors, device = self.config.anchors_per_sequence, self.config.device
        return source.sample(picked, anchors, seed, step).to(device)

    def _models(self, tap_sample: torch.Tensor) -> tuple[FrozenTarget, JetSpecHead]:
        model = load_target(self.config.target)
        ids = self.draft_token_ids
        shape = head_config(self.config, model.config, None if ids is None else len(ids))
        head = initial_head(shape, model, tap_sample, self.config.dropout)
        return freeze(model, ids, self.config.device), head.to(self.config.device)


def check_config(config: TrainConfig) -> None:
    """Refuse before the first forward pass what a loader would refuse after the last.

    Raises HeadError.
    """
    target = AutoConfig.from_pretrained(config.target)
    shape = head_config(config, target, config.draft_vocab_size)
    parse_head_config(raw_config(shape))


def run(config: TrainConfig) -> dict[str, object]:
    """Train (or resume), export, and return a summary."""
    config.out.mkdir(parents=True, exist_ok=True)
    state = TrainingRun(config)
    progress = train(
        state.head,
        state.target,
        config,
        state.batch_at,
        state.held_out_batches(),
        {"export": state.export_details()},
    )
    newest = list_checkpoints(config.out)[-1]
    export_checkpoint(newest, config.out / "head")
    return {
        "head": str(config.out / "head"),
        "checkpoint": str(newest),
        "steps": progress.step,
        "minutes": round(progress.seconds / 60, 2),
        "blocks": progress.step * config.sequences_per_step * config.anchors_per_sequence,
        "train_examples": len(state.train_rows),
        "held_out_examples": len(state.held_out_rows),
    }


def _draft_token_ids(
    config: TrainConfig, examples: list[Example], eos_token_id: int
) -> torch.Tensor | None:
    if config.draft_vocab_size is None:
        return None
    ids = draft_vocabulary(examples, config.draft_vocab_size, always=[eos_token_id])
    return torch.tensor(ids, dtype=torch.int32)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags, train, and print the summary as one JSON line."""
    print(json.dumps(run(tyro.cli(TrainConfig, args=argv, prog="jetspec train"))))


if __name__ == "__main__":
    main()
