"""Passes of a draft head over blocks whose front may be replaced by refreshed states.

Shapes: B requests, M blocks a request, R = g + 1 rows a block, T captured layers, H hidden,
V (draft) vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.foresight.layers import LayerShape, LayerStack, RowKeys, Seen
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead, rotary_table

Map = Callable[[Tensor], Tensor]


def head_shape(config: HeadConfig) -> LayerShape:
    """The shape of a head's layers."""
    return LayerShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        qk_norm=True,
    )


def block_positions(starts: Tensor, rows: int) -> Tensor:
    """[B, M] positions of first rows -> [B, M*rows]."""
    return (starts.unsqueeze(2) + torch.arange(rows, device=starts.device)).flatten(1)


@dataclass(frozen=True)
class BlockDrafter:
    """A causal head with what it borrows from its target.

    layers: the head's, sharing its weights. fuse: captured states [..., T*H] -> [..., H]. norm: the
    last one. embed: ids [...] -> [..., H]. logits: [..., H] -> [..., V]. draft_token_ids: [V] ids
    of a draft vocabulary, None for the target's own.
    """

    config: HeadConfig
    layers: LayerStack
    fuse: Map
    norm: Map
    embed: Map
    logits: Map
    draft_token_ids: Tensor | None = None

    @classmethod
    def of_head(
        cls,
        head: JetSpecHead,
        embedding: Tensor,
        lm_head: Tensor,
        draft_token_ids: Tensor | None = None,
    ) -> BlockDrafter:
        """embedding: [V, H]. lm_head: [V, H], or its rows of the draft vocabulary."""
        config = head.config
        with torch.device("meta"):
            layers = LayerStack(head_shape(config), config.num_hidden_layers)
        layers.layers.load_state_dict(head.layers.state_dict(), assign=True)
        return cls(
            config,
            layers,
            head.fuse,
            head.norm,
            lambda ids: F.embedding(ids, embedding),
            lambda hidden: F.linear(hidden, lm_head),
            draft_token_ids,
        )

    def context_keys(self, states: Tensor, positions: Tensor) -> RowKeys:
        """Keys of positions [B, n] whose captured states [B, n, T*H] are known or predicted."""
        fused, shape = self.fuse(states), self.layers.shape
        rotary = rotary_table(positions, shape.head_dim, shape.rope_theta)
        attentions = (layer.get_submodule("self_attn") for layer in self.layers.layers)
        return RowKeys([attention.project(fused, rotary) for attention in attentions])  # type: ignore[operator]

    def draft(
        self,
        block: Tensor,
        starts: Tensor,
        seen: Sequence[Seen],
        frozen: Tensor,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Best tokens [B, M, g] int64 and their log-probabilities [B, M, g] fp32.

        block: [B, M, R] tokens. starts: [B, M] positions of the rows 0. seen: the keys of what
        precedes the blocks, for all M*R rows. frozen: [B, M], the row that acts as anchor; rows
        before it enter as `states` [B, M*R, T*H] only. Drafts up to `frozen` have no meaning.
        """
        count, rows = block.shape[1:]
        positions = block_positions(starts, rows)
        own, refreshed = refined_masks(frozen, rows)
        if states is not None:
            seen = [*seen, Seen(self.context_keys(states, positions), refreshed)]
        hidden = self.layers(self.embed(block.flatten(1)), positions, own, seen)[-1]
        hidden = self.norm(hidden).view(len(block), count, rows, -1)
        shift = self.config.draft_shift
        logits = self.logits(hidden[:, :, :-1] if shift else hidden[:, :, 1:]).float()
        best, tokens = logits.max(-1)
        if self.draft_token_ids is not None:
            tokens = self.draft_token_ids.long()[tokens]
        return tokens, best - logits.logsumexp(-1)


def same_block(count: int, rows: int, device: torch.device | str) -> Tensor:
    """[count*rows, count*rows] bool: rows of one block that follow each other see those up to
    themselves."""
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    blocks = torch.eye(count, dtype=torch.bool, device=device)
    return (blocks[:, None, :, None] & causal[None, :, None, :]).flatten(2).flatten(0, 1)


def refined_masks(frozen: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which rows [B, M*rows, M*rows] see which: as block rows, and as refreshed states.

    Rows from the anchor on see each other, causally, and the states of the rows before it. Rows
    before the anchor see only themselves, which keeps their (unused) output finite.
    """
    steps = torch.arange(rows, device=frozen.device)
    active = (steps >= frozen.unsqueeze(2)).flatten(1)  # [B, M*rows]
    causal = same_block(frozen.shape[1], rows, frozen.device)
    alone = torch.eye(len(causal), dtype=torch.bool, device=frozen.device)
    own = (causal & active.unsqueeze(2) & active.unsqueeze(1)) | alone
    return own, causal & active.unsqueeze(2) & ~active.unsqueeze(1)
