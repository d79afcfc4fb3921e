"""Foresight drafts waiting for the outcome they were made for.

One row a request slot, read without a host synchronisation; an entry answers once. Whoever comes
to a slot, for the first time or after a retraction, drops what it holds.
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

        self.bases = filled(slots)  # committed length the predictions start from
        self.lengths = filled(slots, outcomes)
        self.anchors = filled(slots, outcomes)
        self.blocks = filled(slots, outcomes, drafts)
        self.logprobs = torch.zeros(slots, outcomes, drafts, device=device)

    def put(
        self,
        slots: Tensor,
        bases: Tensor,
        outcomes: Outcomes,
        blocks: Tensor,
        logprobs: Tensor,
    ) -> None:
        """Replace the entries of `slots` [n].

        bases [n]: committed length at prediction.
        outcomes: [n, M], M <= B; those of score -inf are never found. blocks: [n, M, g] drafts.
        logprobs: [n, M, g] fp32, the head's of each draft.
        """
        count = blocks.shape[1]
        self.drop(slots)
        self.bases[slots] = bases
        live = outcomes.scores.isfinite()
        self.lengths[slots, :count] = outcomes.lengths.where(live, -1)
        self.anchors[slots, :count] = outcomes.anchors
        self.blocks[slots, :count] = blocks
        self.logprobs[slots, :count] = logprobs

    def waiting(self, slots: Tensor) -> Tensor:
        """[n] bool: whether something was put for `slots` that nobody has asked for."""
        return self.bases[slots] >= 0

    def take(self, slots: Tensor, ends: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Look up and remove the entries of `slots` [n].

        ends [n]: committed length now, `anchors` [n] the token behind it: the outcome is the
        committed tokens since the prediction and this one. Returns hit [n] bool, the drafts [n, g]
        int64 (-1 where missed) and their log-probabilities [n, g] (0 where missed).
        """
        lengths = (ends - self.bases[slots] - 1).unsqueeze(1)
        same = (self.lengths[slots] == lengths) & (self.anchors[slots] == anchors[:, None])
        same &= self.lengths[slots] >= 0
        hit = same.any(1)
        index = same.int().argmax(1)
        blocks = self.blocks[slots, index].where(hit[:, None], -1)
        logprobs = self.logprobs[slots, index].where(hit[:, None], 0.0)
        self.drop(slots)
        return hit, blocks, logprobs

    def drop(self, slots: Tensor) -> None:
        """Forget the entries of `slots` [n]: finished, aborted or retracted requests."""
        self.bases[slots] = -1
        self.lengths[slots] = -1
