"""The tokens of each request, on the device: what noise tokens are drawn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_jetspec.request_state import sent
from sglang_jetspec.verification import Acceptance
from sglang_jetspec.window import counting


class RequestText:
    """One row a request slot, column p holds the token at position p.

    Committed tokens only, the last round's bonus token included. Every prefill writes its requests'
    rows anew.
    """

    def __init__(self, slots: int, positions: int, device: torch.device | str) -> None:
        self.tokens = torch.zeros(slots, positions, dtype=torch.int32, device=device)

    def begin(self, batch: Any, sampled: Tensor) -> None:
        """After a prefill: the prompts, and the [B] tokens sampled behind them."""
        for req, row, start, count in zip(
            batch.reqs,
            batch.req_pool_indices,
            batch.prefix_lens,
            batch.extend_lens,
            strict=True,
        ):
            ids = [*req.origin_input_ids, *req.output_ids][: start + count]
            self.tokens[row, : len(ids)] = sent(ids, self.tokens.device).int()
        self._write(batch.req_pool_indices, batch.seq_lens, sampled.unsqueeze(1))

    def advance(self, batch: Any, acceptance: Acceptance) -> None:
        """After a round: what it committed. Padding lands where the next round writes."""
        self._write(batch.req_pool_indices, batch.seq_lens + 1, acceptance.tokens)

    def rows(self, batch: Any) -> Tensor:
        """[B, positions] int32 of the batch's requests."""
        return self.tokens[batch.req_pool_indices]

    def _write(self, rows: Tensor, starts: Tensor, tokens: Tensor) -> None:
        columns = starts.unsqueeze(1) + counting(tokens.shape[1], self.tokens.device)
        columns = columns.clamp(max=self.tokens.shape[1] - 1)
        self.tokens[rows.unsqueeze(1), columns] = tokens.int()
