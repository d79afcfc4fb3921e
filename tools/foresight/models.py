"""The models of one target, its head and its adapter, in plain torch, for offline programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_jetspec.foresight.adapter import load_adapter
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.drafter import BlockDrafter
from sglang_jetspec.foresight.drafting import ForesightDrafter
from sglang_jetspec.foresight.layers import KeyCache
from sglang_jetspec.heads.format import HeadConfig, HeadError
from sglang_jetspec.heads.reference import load_reference_head


@dataclass(frozen=True)
class Models:
    """The target as verifier, and what drafts for it."""

    target: TargetSlice
    foresight: ForesightDrafter

    @property
    def head(self) -> HeadConfig:
        """The draft head's settings."""
        return self.foresight.drafter.config

    @property
    def decoded_from(self) -> int:
        """The first target layer above the captured ones."""
        return self.head.target_layer_ids[-1] + 1

    def make_caches(self, batch: int, positions: int) -> tuple[KeyCache, KeyCache, KeyCache | None]:
        """Empty caches for the keys of target, head and adapter."""
        target, head, adapter = self.target, self.foresight.drafter.layers, self.foresight.adapter
        return (
            KeyCache(target.stack.shape, len(target.stack.layers), batch, positions),
            KeyCache(head.shape, len(head.layers), batch, positions),
            adapter and KeyCache(adapter.config.shape, adapter.layers, batch, positions),
        )

    def embed(self, ids: Tensor) -> Tensor:
        """[...] ids -> [..., H]."""
        return self.foresight.drafter.embed(ids)

    def captured(self, states: list[Tensor]) -> Tensor:
        """States after every target layer -> [B, R, T*H] captured ones."""
        return torch.cat([states[layer] for layer in self.head.target_layer_ids], dim=-1)


def load_models(
    target: Path, head: Path, adapter: Path | None, dtype: torch.dtype = torch.float32
) -> Models:
    """Load all parts; raises HeadError when the adapter was made for other captured layers."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    return assemble_models(model, head, adapter, dtype)


def assemble_models(
    model: Any, head: Path, adapter: Path | None, dtype: torch.dtype = torch.float32
) -> Models:
    """As `load_models`, with the target at hand."""
    reference, draft_token_ids = load_reference_head(head, dtype=dtype)
    taps = reference.config.target_layer_ids
    loaded = None if adapter is None else load_adapter(adapter, dtype)
    if loaded is not None and loaded.config.target_layer_ids != taps:
        raise HeadError(
            f"the adapter in {adapter} predicts layers {list(loaded.config.target_layer_ids)}, the "
            f"head in {head} reads {list(taps)}; use the adapter trained for this head"
        )
    embedding = model.get_input_embeddings().weight.detach()
    lm_head = model.get_output_embeddings().weight.detach()
    rows = lm_head if draft_token_ids is None else lm_head[draft_token_ids.long()]
    drafter = BlockDrafter.of_head(reference, embedding, rows, draft_token_ids)
    decoder = TargetSlice.of_target(model, taps[-1] + 1)
    foresight = ForesightDrafter(drafter, decoder, loaded)
    return Models(TargetSlice.of_target(model, 0), foresight)
