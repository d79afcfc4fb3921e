"""Measurements on held-out tasks during training."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_jetspec.tools.train.acceptance import TreeShape, mean_lengths, rounds_by_answer
from sglang_jetspec.tools.train.batches import Batch
from sglang_jetspec.tools.train.features import Features
from sglang_jetspec.tools.train.log import Step
from sglang_jetspec.tools.train.loop import averages, batch_sums
from sglang_jetspec.tools.train.loss import BlockModel, block_loss


@dataclass(frozen=True)
class HeldOut:
    """`batches` of blocks and the answers `examples`; `scales` as in training."""

    model: BlockModel
    draft_token_ids: Tensor | None
    features: Features
    scales: Tensor
    batches: Sequence[Batch]
    examples: Sequence[int]
    shapes: Sequence[TreeShape]
    autocast: Callable[[], AbstractContextManager[None]]

    @torch.no_grad()
    def measure(self) -> Step:
        """The log's `held_out_*` values and `acceptance_length` by tree."""
        model, head = self.model, self.model.head.eval()
        device = head.fc.weight.device
        row: Step = {}
        if self.batches:
            with self.autocast():
                sums = [
                    batch_sums(block_loss(head, model.target, moved, model.objective), moved)
                    for moved in (batch.to(device) for batch in self.batches)
                ]
            means = averages(torch.stack(sums).sum(0))
            row = {f"held_out_{name}": value for name, value in means.items()}
        if self.examples:
            rounds = rounds_by_answer(
                head,
                model.target,
                self.draft_token_ids,
                self.features,
                self.examples,
                self.shapes,
                self.scales,
            )
            row["acceptance_length"] = mean_lengths(rounds)
        return row
