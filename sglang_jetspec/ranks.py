"""One decision for all tensor-parallel ranks. Plain torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sglang_jetspec.verification import Acceptance


class Ranks(Protocol):
    """The part of SGLang's ``GroupCoordinator`` that is used."""

    world_size: int

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor: ...

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor: ...


def agreed(acceptance: Acceptance, ranks: Ranks) -> Acceptance:
    """Rank 0's acceptance on every rank: ties and draws may fall differently elsewhere."""
    if ranks.world_size == 1:
        return acceptance
    parts = (acceptance.path, acceptance.tokens, acceptance.lengths.unsqueeze(1))
    decided = ranks.broadcast(torch.cat(parts, 1), src=0)
    path, tokens, lengths = torch.split(decided, [part.shape[1] for part in parts], dim=1)
    return Acceptance(path, lengths.squeeze(1), tokens)
