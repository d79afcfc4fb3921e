"""What the rows of a training block hold besides the anchor: masks, or tokens (JetSpec++).

Letters: A blocks of one example. Slot i of a block is the prediction of the token i places behind
the anchor, whichever row makes it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sglang_jetspec.foresight.noise import training_noise
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import block_ids


class BlockInputs(Protocol):
    """Fills blocks; see the implementations."""

    def fill(
        self, text: Tensor, anchors: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Ids [A, rows], and which slots' answers no row shows: [A, rows], or [A, 1] for all.

        text: [C] int64 the whole example. anchors: [A] positions.
        """


@dataclass(frozen=True)
class MaskInputs:
    """JetSpec: every row behind the anchor holds the mask token."""

    rows: int
    mask_token_id: int

    def fill(
        self, text: Tensor, anchors: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """See `BlockInputs`."""
        ids = block_ids(text[anchors][:, None], self.rows, self.mask_token_id)
        return ids, torch.ones(len(ids), 1, dtype=torch.bool)


@dataclass(frozen=True)
class TokenInputs:
    """JetSpec++: a clean prefix of the text, then noise from the text up to the anchor.

    With probability `noised_share` there is no clean prefix, else its length is uniform in
    1..rows-1 (JetSpec++ paper, appendix E: share 0.25, block of 16). In place (`shift` False) a
    clean row shows its own answer: such slots are not supervised, and one slot stays noised.
    """

    rows: int
    shift: bool
    noised_share: float = 0.25

    def fill(
        self, text: Tensor, anchors: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """See `BlockInputs`."""
        count, size = len(anchors), self.rows
        longest = size - 1 if self.shift else size - 2
        clean = torch.randint(1, max(longest, 1) + 1, (count,), generator=generator)
        clean *= torch.rand(count, generator=generator) >= self.noised_share
        clean = clean.clamp(max=longest)
        noise = training_noise(text.expand(count, -1), anchors + 1, size, generator)
        slots = torch.arange(size)
        following = anchors[:, None] + slots
        shown = (slots <= clean[:, None]) & (following < len(text))
        ids = torch.where(shown, text[following.clamp(max=len(text) - 1)], noise)
        hidden = torch.ones_like(shown) if self.shift else ~shown
        return ids, hidden


def block_inputs(config: HeadConfig, noised_share: float = 1.0) -> BlockInputs:
    """How a head's blocks are filled; `noised_share` 1 is the first pass of drafting."""
    if config.token_input:
        return TokenInputs(config.block_size, config.draft_shift, noised_share)
    return MaskInputs(config.block_size, config.mask_token_id)
