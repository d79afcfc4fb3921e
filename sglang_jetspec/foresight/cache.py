"""Foresight drafts waiting for the outcome they were made for.

One row a request slot, read without a host synchronisation. An entry answers only the request that
it was made for, at the committed length it was predicted from, once: a retracted request comes
back with another length or owner, and a reused slot with another owner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.foresight.outcomes import Outcomes


class OutcomeCache:
    """B outcomes of g drafts for each of `slots` requests."""

    def __init__(self, slots: int, outcomes: int, drafts: int, device: torch.device | str) -> None:
        def filled(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int64, device=device)

        self.owners = filled(slots)
        self.bases = filled(slots)  # committed length the predictions start from
        self.lengths = filled(slots, outcomes)
        self.anchors = filled(slots, outcomes)
        self.blocks = filled(slots, outcomes, drafts)

    def put(
        self, slots: Tensor, owners: Tensor, bases: Tensor, outcomes: Outcomes, blocks: Tensor
    ) -> None:
        """Replace the entries of `slots` [n].

        owners [n]: unique id of each request. bases [n]: committed length at prediction.
        outcomes: [n, M], M <= B; those of score -inf are never found. blocks: [n, M, g] drafts.
        """
        count = blocks.shape[1]
        self.drop(slots)
        self.owners[slots] = owners
        self.bases[slots] = bases
        live = outcomes.scores.isfinite()
        self.lengths[slots, :count] = outcomes.lengths.where(live, -1)
        self.anchors[slots, :count] = outcomes.anchors
        self.blocks[slots, :count] = blocks

    def take(
        self, slots: Tensor, owners: Tensor, bases: Tensor, lengths: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Look up and remove the entries of `slots` [n].

        bases [n]: committed length when the verified block was predicted. lengths, anchors [n]:
        the outcome. Returns hit [n] bool and the drafts [n, g] int64 (-1 where missed).
        """
        same = (self.lengths[slots] == lengths[:, None]) & (self.anchors[slots] == anchors[:, None])
        same &= self.lengths[slots] >= 0
        same &= ((self.owners[slots] == owners) & (self.bases[slots] == bases))[:, None]
        hit = same.any(1)
        index = same.int().argmax(1)
        blocks = self.blocks[slots, index].where(hit[:, None], -1)
        self.drop(slots)
        return hit, blocks

    def drop(self, slots: Tensor) -> None:
        """Forget the entries of `slots` [n]: finished, aborted or retracted requests."""
        self.owners[slots] = -1
        self.lengths[slots] = -1
