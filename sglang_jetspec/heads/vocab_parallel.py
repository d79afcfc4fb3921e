"""Drafting over a vocabulary that is split among tensor-parallel ranks.

Each rank ranks its own columns; W values and ids and one normaliser a row are exchanged, not the
logits. B requests, D depth, W width, V columns of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_jetspec.heads.drafting import top_rows
from sglang_jetspec.ranks import Ranks


@dataclass(frozen=True)
class VocabularyShard:
    """The vocabulary columns of one rank.

    ids: [V] int64 the columns' token ids, where they are no run. first: id of column 0 otherwise.
    """

    ranks: Ranks
    first: int = 0
    ids: Tensor | None = None

    def propose(
        self, logits: Tensor, width: int, entropies: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`top_rows` over the whole vocabulary, the same on every rank.

        logits: [B, D, V] fp32. Returns tokens [B, D, W] int64 and log-probabilities [B, D, W] fp32,
        best first, and the rows' entropies [B, D] fp32 in nats if asked for.
        """
        if self.ranks.world_size == 1:
            return top_rows(logits, width, self.ids, entropies)
        top, column = torch.topk(logits, min(width, logits.shape[-1]), dim=-1)
        tokens = column + self.first if self.ids is None else self.ids[column]
        missing = width - top.shape[-1]
        top, tokens = pad(top, (0, missing), value=float("-inf")), pad(tokens, (0, missing))
        normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
        top, tokens, normaliser = self._best_of_all(top, tokens, normaliser)
        spread = None
        if entropies:
            part = torch.special.entr((logits - normaliser).exp()).sum(-1, keepdim=True)
            spread = self.ranks.all_gather(part, dim=-1).sum(-1)
        return tokens, top - normaliser, spread

    def _best_of_all(
        self, top: Tensor, tokens: Tensor, normaliser: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = top.shape[-1]
        # Doubles hold fp32 values and token ids alike, so that one exchange does.
        mine = torch.cat([top.double(), tokens.double(), normaliser.double()], -1)
        parts = self.ranks.all_gather(mine, dim=-1)
        parts = parts.view(*top.shape[:-1], self.ranks.world_size, 2 * width + 1)
        values, ids, normalisers = torch.split(parts, [width, width, 1], dim=-1)
        best, place = torch.topk(values.flatten(-2), width, dim=-1)
        chosen = ids.flatten(-2).gather(-1, place)
        normaliser = torch.logsumexp(normalisers.squeeze(-1), dim=-1, keepdim=True)
        # Rank 0 decides: a tie may fall differently elsewhere.
        decided = self.ranks.broadcast(torch.cat([best, chosen, normaliser], -1), src=0)
        best, chosen, normaliser = torch.split(decided, [width, width, 1], dim=-1)
        return best.float(), chosen.long(), normaliser.float()
