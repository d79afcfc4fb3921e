"""`jetspec train`: from prompts to an exported head.

    jetspec train --target DIR --prompts FILE --out DIR

Without --answers the target answers the prompts first. Running it again with the same --out
resumes; `accelerate launch -m sglang_jetspec.tools.train.run ...` trains on several devices. The
head is exported to `OUT/head`; the last line of stdout is one JSON object.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs, PartialState
from transformers import AutoTokenizer

from sglang_jetspec.heads.format import resolve_head
from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.acceptance import TreeShape
from sglang_jetspec.tools.train.batches import Batch, BatchSource, pick_examples
from sglang_jetspec.tools.train.block_inputs import block_inputs
from sglang_jetspec.tools.train.checkpoint import list_checkpoints
from sglang_jetspec.tools.train.config import TrainConfig, parse
from sglang_jetspec.tools.train.data import (
    corpus_examples,
    draft_vocabulary,
    is_held_out,
    load_examples,
    read_prompts,
)
from sglang_jetspec.tools.train.evaluation import HeldOut
from sglang_jetspec.tools.train.export import export_checkpoint, export_details
from sglang_jetspec.tools.train.features import Features, OnlineFeatures, capture_features
from sglang_jetspec.tools.train.loop import Trainer
from sglang_jetspec.tools.train.loss import BlockModel, Objective
from sglang_jetspec.tools.train.precision import computes_bf16
from sglang_jetspec.tools.train.provenance import RUN_FILE, record_data, record_launch
from sglang_jetspec.tools.train.shape import resolve
from sglang_jetspec.tools.train.target import (
    freeze,
    head_config,
    imported_head,
    initial_head,
    load_target,
    tap_scales,
)

TAP_SAMPLE = 2048
HELD_OUT_BATCHES = 8


class TrainingRun:
    """Everything a run derives from its configuration, before the first step."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator) -> None:
        config, head_shape = resolve(config)
        self.config, self.accelerator = config, accelerator
        tokenizer = AutoTokenizer.from_pretrained(config.target)
        prompts = read_prompts(config.prompts, config.licenses)
        if config.data == "corpus":
            self.examples = corpus_examples(prompts, tokenizer, config.max_sequence_tokens)
        else:
            self.examples = load_examples(
                prompts, answers_path(config), tokenizer, config.max_sequence_tokens
            )
        mask_token_id = head_shape.mask_token_id
        if any(mask_token_id in example.token_ids for example in self.examples):
            raise ValueError(
                f"--mask-token-id is {mask_token_id}, which occurs in the training text; "
                f"give an unused token of the target"
            )
        self.lengths = [len(example.token_ids) for example in self.examples]
        held_out = [is_held_out(example.id, config.held_out_share) for example in self.examples]
        self.train_rows = [i for i, held in enumerate(held_out) if not held]
        self.held_out_rows = [i for i, held in enumerate(held_out) if held]
        if len(self.train_rows) < accelerator.num_processes:
            raise ValueError(
                f"{len(self.train_rows)} of {len(self.examples)} answers are left to train on, "
                f"fewer than processes ({accelerator.num_processes}): held_out_share is "
                f"{config.held_out_share}; lower it or give more prompts"
            )
        used = {example.id for example in self.examples}
        self.licenses = sorted({p.license for p in prompts if p.license and p.id in used})
        target = load_target(config.target, accelerator.device)
        self.features = self._features(target)
        torch.manual_seed(config.seed)
        sample = self.features.sample_taps(TAP_SAMPLE)
        self.scales = tap_scales(sample)
        head, self.draft_token_ids = self._head(target, sample, tokenizer.eos_token_id)
        objective = Objective(config.objective, config.temperature, config.loss_decay_gamma)
        self.model = BlockModel(
            head.to(accelerator.device), freeze(target, self.draft_token_ids), objective
        )
        inputs = block_inputs(head.config, config.noised_share)
        self.source = BatchSource(self.features, self.scales, head.config.max_depth + 1, inputs)

    def batch_at(self, step: int) -> Batch:
        """This process's part of the training batch of `step`."""
        batch = self._batch(self.source, self.train_rows, self.config.seed, step, self._share)
        return batch.to(self.accelerator.device)

    def held_out(self) -> HeldOut | None:
        """What is measured on held-out tasks; None when no task is held out.

        Their blocks are filled as in the first pass of drafting.
        """
        config, rows = self.config, self.held_out_rows
        if not rows:
            return None
        size = min(config.sequences_per_step, len(rows))
        steps = min(HELD_OUT_BATCHES, len(rows) // size)
        depth = self.model.head.config.max_depth + 1
        width, nodes = config.evaluate_width, config.evaluate_budget
        first_pass = replace(self.source, inputs=block_inputs(self.model.head.config))
        return HeldOut(
            self.model,
            self.draft_token_ids,
            self.features,
            self.scales,
            [self._batch(first_pass, rows, 0, step) for step in range(steps)],
            rows[: config.evaluate_examples],
            (TreeShape(depth, 1), TreeShape(nodes, width)),
            self.accelerator.autocast,
        )

    def export_details(self) -> dict[str, Any]:
        """What checkpoints need besides weights to be exported."""
        return export_details(self.model.head.config, self.scales, self.draft_token_ids)

    def data_facts(self) -> dict[str, Any]:
        """Sizes and origin of the data, for the model card."""
        tokens = [
            len(self.examples[i].token_ids) - self.examples[i].prompt_length
            for i in self.train_rows
        ]
        return {
            "train_examples": len(self.train_rows),
            "held_out_examples": len(self.held_out_rows),
            "answer_tokens": sum(tokens),
            "sources": sorted({example.source for example in self.examples if example.source}),
            "licenses": self.licenses,
        }

    @property
    def _share(self) -> slice:
        return slice(self.accelerator.process_index, None, self.accelerator.num_processes)

    def _batch(
        self,
        source: BatchSource,
        rows: list[int],
        seed: int,
        step: int,
        share: slice = slice(None),
    ) -> Batch:
        size = min(self.config.sequences_per_step, len(rows))
        picked = pick_examples(rows, self.lengths, size, seed, step)
        return source.sample(picked, self.config.anchors_per_sequence, seed, step, share)

    def _features(self, target: torch.nn.Module) -> Features:
        config = self.config
        if config.features == "online":
            return OnlineFeatures(target, config.target_layer_ids, self.examples)
        folder = config.features_dir or config.out / "features"
        wait = self.accelerator.wait_for_everyone
        taps = config.target_layer_ids
        return capture_features(target, taps, self.examples, folder, self._share, wait)

    def _head(
        self, target: torch.nn.Module, tap_sample: torch.Tensor, eos_token_id: int
    ) -> tuple[JetSpecHead, torch.Tensor | None]:
        config = self.config
        if config.init_from is not None:
            return imported_head(resolve_head(config.init_from), self.scales, config.dropout)
        ids = None
        if config.draft_vocab_size is not None:
            examples = [self.examples[i] for i in self.train_rows]
            kept = draft_vocabulary(examples, config.draft_vocab_size, always=[eos_token_id])
            ids = torch.tensor(kept, dtype=torch.int32)
        shape = head_config(config, target.config, None if ids is None else len(ids))
        return initial_head(shape, target, tap_sample, config.dropout), ids


def answers_path(config: TrainConfig) -> Path:
    """Where the target's answers are, or will be."""
    return config.answers or config.out / "answers.jsonl"


def answer_prompts(config: TrainConfig) -> None:
    """Let the target answer what it has not answered yet, if the run needs it.

    Raises ValueError when several processes find no answers: SGLang's engine wants one.
    """
    path = answers_path(config)
    if config.data == "corpus" or config.answers is not None:
        return
    if PartialState().num_processes > 1:
        if not path.exists():
            raise ValueError(f"{path} does not exist; give --answers, or start with one process")
        return
    from sglang_jetspec.tools.regenerate import regenerate  # SGLang, which training does not need

    prompts = read_prompts(config.prompts, config.licenses)
    regenerate(config.target, prompts, path, config.generation)


def make_accelerator(config: TrainConfig) -> Accelerator:
    """The run's processes and devices."""
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait for answers
    device = PartialState(cpu=config.device == "cpu", timeout=patience.timeout).device
    precision = "bf16" if config.bf16 and computes_bf16(device) else "no"
    return Accelerator(
        cpu=config.device == "cpu", mixed_precision=precision, kwargs_handlers=[patience]
    )


def run(config: TrainConfig) -> dict[str, object]:
    """Answer the prompts if needed, train (or resume), export, and return a summary."""
    config, _ = resolve(config)
    accelerator = make_accelerator(config)
    if config.sequences_per_step < accelerator.num_processes:
        raise ValueError(
            f"sequences_per_step is {config.sequences_per_step}; give at least one for each of "
            f"the {accelerator.num_processes} processes"
        )
    if accelerator.is_main_process:
        config.out.mkdir(parents=True, exist_ok=True)
        record_launch(config, config.out / RUN_FILE)
    answer_prompts(config)
    accelerator.wait_for_everyone()
    state = TrainingRun(config, accelerator)
    trainer = Trainer(state.model, config, accelerator, {"export": state.export_details()})
    if accelerator.is_main_process:
        record_data(state.data_facts(), config.out / RUN_FILE)
    held_out = state.held_out()
    progress = trainer.train(state.batch_at, held_out and held_out.measure)
    accelerator.wait_for_everyone()  # for the last checkpoint
    newest = list_checkpoints(config.out)[-1]
    if accelerator.is_main_process:
        trainer.log.plot()
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


def main(argv: Sequence[str] | None = None) -> None:
    """Parse flags, train, and print the summary as one JSON line."""
    print(json.dumps(run(parse(sys.argv[1:] if argv is None else argv))))


if __name__ == "__main__":
    main()
