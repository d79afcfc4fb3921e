"""Training batches: many blocks a sequence behind one shared context.

`sample_batch` is a pure function of (seed, step), so a resumed run sees the batches that an
uninterrupted one would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sglang_jetspec.tools.train.block_inputs import BlockInputs
from sglang_jetspec.tools.train.data import Example
from sglang_jetspec.tools.train.features import Features

POOL_STEPS = 16  # steps whose sequences are sorted by length together, so that padding stays small


@dataclass(frozen=True)
class Batch:
    """B sequences with A blocks each; letters as in `sglang_jetspec.heads.reference`."""

    taps: Tensor  # [B,C,T*H] bf16, scaled and zero-padded
    anchors: Tensor  # [B,A] int64 positions
    tokens: Tensor  # [B,A,block_size] int64: the text, -1 past its end
    finals: Tensor  # [B,A,block_size,H] bf16: target state that predicts each slot's token
    supervised: Tensor  # [B,A,block_size] bool: slots with a known target distribution
    inputs: Tensor  # [B,A,rows] int64 ids of the head's rows, the anchor first

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        tensors = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        return Batch(**tensors)


def pick_examples(
    indices: Sequence[int], lengths: Sequence[int], size: int, seed: int, step: int
) -> list[int]:
    """`size` of `indices` for `step`: shuffled epochs, similar lengths together."""
    steps_per_epoch = max(len(indices) // size, 1)
    epoch, position = divmod(step, steps_per_epoch)
    order = torch.randperm(len(indices), generator=_generator(seed, 2 * epoch)).tolist()
    pools = range(0, steps_per_epoch * size, POOL_STEPS * size)
    groups = []
    for start in pools:
        pool = order[start : min(start + POOL_STEPS * size, steps_per_epoch * size)]
        pool.sort(key=lambda i: lengths[indices[i]])
        groups += [pool[i : i + size] for i in range(0, len(pool), size)]
    shuffled = torch.randperm(len(groups), generator=_generator(seed, 2 * epoch + 1)).tolist()
    return [indices[i] for i in groups[shuffled[position]]]


@dataclass(frozen=True)
class BatchSource:
    """Draws blocks from target features; `scales` [T*H] divide the tapped states."""

    features: Features
    scales: Tensor
    block_size: int
    inputs: BlockInputs

    def sample(
        self, picked: Sequence[int], anchors: int, seed: int, step: int, share: slice = slice(None)
    ) -> Batch:
        """Blocks at `anchors` uniformly drawn answer positions of every picked example.

        `share` selects this process's part of the picked examples; the draw depends on all.
        """
        generator = _generator(seed + 1, step)
        examples = [self.features.examples[i] for i in picked]
        positions = [draw_anchors(example, anchors, generator) for example in examples]
        drawn = torch.stack(positions)
        filled = self.fill(picked, drawn, generator)
        return self.assemble(picked[share], drawn[share], filled[share])

    def fill(
        self, picked: Sequence[int], anchors: Tensor, generator: torch.Generator
    ) -> list[tuple[Tensor, Tensor]]:
        """What the rows of each example's blocks hold; see `BlockInputs.fill`."""
        texts = (torch.tensor(self.features.examples[i].token_ids) for i in picked)
        return [
            self.inputs.fill(text, row, generator) for text, row in zip(texts, anchors, strict=True)
        ]

    def assemble(
        self, picked: Sequence[int], anchors: Tensor, filled: list[tuple[Tensor, Tensor]]
    ) -> Batch:
        """Features and targets of blocks at `anchors` [B,A], filled by `fill`."""
        width = len(self.scales)
        taps = torch.zeros(len(picked), int(anchors.max()), width, dtype=torch.bfloat16)
        finals, supervised, tokens = [], [], []
        for row, (i, states) in enumerate(zip(picked, self.features.fetch(picked), strict=True)):
            example = self.features.examples[i]
            length, visible = len(example.token_ids), int(anchors[row].max())
            taps[row, :visible] = states.taps[:visible] / self.scales
            predicted = anchors[row][:, None] + torch.arange(self.block_size)
            # The state at the last token predicts one more token unless the answer ended there.
            known = predicted < length + (not example.finished)
            known[:, 0] = False  # the anchor row predicts nothing
            supervised.append(known & filled[row][1])
            finals.append(states.finals[(predicted - 1).clamp(max=length - 1)])
            text = torch.tensor(example.token_ids)[predicted.clamp(max=length - 1)]
            tokens.append(text.where(predicted < length, -1))
        inputs = torch.stack([ids for ids, _ in filled])
        stacked = (torch.stack(part) for part in (tokens, finals, supervised))
        return Batch(taps, anchors, *stacked, inputs)


def draw_anchors(example: Example, count: int, generator: torch.Generator) -> Tensor:
    """[count] ascending answer positions that have a successor, distinct when there are enough."""
    first, last = example.prompt_length, len(example.token_ids) - 1
    choices = max(last - first, 1)
    rounds = [torch.randperm(choices, generator=generator) for _ in range(-(-count // choices))]
    return first + torch.cat(rounds)[:count].sort().values


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + stream)
