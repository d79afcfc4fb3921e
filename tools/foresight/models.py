"""The models of one target, its head and its adapter, in plain torch, for offline programs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_jetspec.foresight.adapter import Adapter, load_adapter
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.drafter import BlockDrafter
from sglang_jetspec.heads.format import HeadError
from sglang_jetspec.heads.reference import load_reference_head


@dataclass(frozen=True)
class Models:
    """adapter None: no foresight and no refresh, plain drafting only."""

    target: TargetSlice
    drafter: BlockDrafter
    decoder: TargetSlice
    adapter: Adapter | None
    embedding: Tensor  # [V, H]

    @property
    def taps(self) -> tuple[int, ...]:
        """Ids of the captured layers."""
        return self.drafter.head.config.target_layer_ids

    @property
    def drafts(self) -> int:
        """g, drafts of one block."""
        return self.drafter.head.config.block_size - 1

    def embed(self, ids: Tensor) -> Tensor:
        """[...] ids -> [..., H]."""
        return F.embedding(ids, self.embedding)

    def captured(self, states: list[Tensor]) -> Tensor:
        """States after every target layer -> [B, R, T*H] captured ones."""
        return torch.cat([states[layer] for layer in self.taps], dim=-1)


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
    return Models(
        target=TargetSlice.of_target(model, 0),
        drafter=BlockDrafter(reference, embedding, rows, draft_token_ids),
        decoder=TargetSlice.of_target(model, taps[-1] + 1),
        adapter=loaded,
        embedding=embedding,
    )
