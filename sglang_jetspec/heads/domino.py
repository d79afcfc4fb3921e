"""Domino heads: a DFlash block whose rows get a bias from a GRU over the tokens before.

As SGLang 0.5.23 (``speculative/domino_utils.py``) and the released checkpoints define them. The
first draft of a block has no bias. With ``shift_label`` the anchor row drafts and the block's last
row drafts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_jetspec.heads.correction import Correction, Embed
from sglang_jetspec.heads.fields import HeadError, boolean, positive_int


@dataclass(frozen=True)
class DominoConfig:
    """Sizes of the GRU's state and of the bottleneck before the vocabulary."""

    gru_hidden_dim: int
    emb_dim: int
    shift_label: bool = True
    kind: str = "domino"
    idle_rows: int = 1

    @property
    def first_row(self) -> int:
        return 0 if self.shift_label else 1

    def tensors(self, hidden_size: int, vocab_size: int, ranked: int) -> dict[str, tuple[int, ...]]:
        state = self.gru_hidden_dim
        return {
            "prefix_gru.weight_ih_l0": (3 * state, hidden_size),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (self.emb_dim, hidden_size + state),
            "embed_proj.2.weight": (ranked, self.emb_dim),
        }

    def build(self, hidden_size: int, vocab_size: int, ranked: int) -> Correction:
        return GruCorrection(self, hidden_size, ranked)

    def raw(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"emb_dim": self.emb_dim}, {
            "projector_type": "domino",
            "gru_hidden_dim": self.gru_hidden_dim,
            "emb_dim": self.emb_dim,
            "shift_label": self.shift_label,
            "pure_draft_prefix_len": 1,
        }


def read_domino(top: Mapping[str, Any], dflash: Mapping[str, Any]) -> DominoConfig | None:
    """Keys stand in ``dflash_config`` or at the top level; the former win."""
    fields = {**top, **dflash}
    if fields.get("projector_type") != "domino":
        return None
    if (prefix := fields.get("pure_draft_prefix_len")) != 1:
        raise HeadError(
            f"dflash_config.pure_draft_prefix_len is {prefix!r}; Domino heads draft exactly 1 "
            f"token without the GRU"
        )
    if "shift_label" not in fields:
        raise HeadError("dflash_config.shift_label is missing; add what the head was trained with")
    outer, inner = top.get("emb_dim"), dflash.get("emb_dim")
    if None not in (outer, inner) and outer != inner:
        raise HeadError(f"emb_dim is {outer}, dflash_config.emb_dim is {inner}; make them equal")
    return DominoConfig(
        gru_hidden_dim=positive_int(fields, "gru_hidden_dim", "dflash_config."),
        emb_dim=positive_int(fields, "emb_dim", "dflash_config."),
        shift_label=boolean(fields, "shift_label", True, "dflash_config."),
    )


class GruCorrection(Correction):
    """The state is the GRU's after the previous token, the root included. Untrained, it adds no
    bias."""

    def __init__(self, config: DominoConfig, hidden_size: int, ranked: int) -> None:
        super().__init__()
        state, inner = config.gru_hidden_dim, config.emb_dim
        self.prefix_gru = nn.GRU(hidden_size, state, bias=False, batch_first=True)
        output = nn.Linear(inner, ranked, bias=False)
        nn.init.zeros_(output.weight)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + state, inner, bias=False), nn.SiLU(), output
        )

    def step(
        self, depth: int, hidden: Tensor, previous: Tensor, state: Tensor | None, embed: Embed
    ) -> tuple[Tensor | None, Tensor]:
        gru = self.prefix_gru
        if state is None:
            state = hidden.new_zeros(len(hidden), gru.hidden_size)
        token = embed(previous).to(hidden.dtype)
        # torch.gru_cell, which autocast does not cover on every device.
        weights = gru.all_weights[0]
        inputs = F.linear(token, weights[0]).chunk(3, -1)
        inner = F.linear(state, weights[1]).chunk(3, -1)
        reset, update = (inputs[0] + inner[0]).sigmoid(), (inputs[1] + inner[1]).sigmoid()
        fresh = (inputs[2] + reset * inner[2]).tanh()
        state = fresh + update * (state - fresh)
        if depth == 1:
            return None, state
        return self.embed_proj(torch.cat([hidden, state], -1)), state
