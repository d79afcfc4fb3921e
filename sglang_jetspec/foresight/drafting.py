"""Drafting with foresight: blocks behind true or predicted states, for one outcome or for many.

Shapes: B requests, M blocks a request (one, or one an outcome), R = g + 1 rows a block, n keys,
T captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_jetspec.foresight.adapter import Adapter
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.drafter import BlockDrafter, block_positions, same_block
from sglang_jetspec.foresight.layers import Keys, RowKeys, Seen
from sglang_jetspec.foresight.noise import first_inputs
from sglang_jetspec.foresight.outcomes import Outcomes
from sglang_jetspec.foresight.refine import Refined, RefinePlan, refine


@dataclass(frozen=True)
class Part:
    """Positions before a block, as keys of the three networks; None where one cannot see them.

    visible: [B, M, n] bool, which of them each block sees.
    """

    head: Keys | None
    decoder: Keys | None
    adapter: Keys | None
    visible: Tensor

    def blocks(self, count: int) -> Part:
        """The same for `count` blocks a request."""
        visible = self.visible.expand(-1, count, -1)
        return Part(self.head, self.decoder, self.adapter, visible)


Context = Sequence[Part]


@dataclass(frozen=True)
class Prediction:
    """What adapter and decoder say of blocks.

    states: [B, M*R, T*H] captured states. logits: [B, M*R, V] fp32, the target's behind each row.
    """

    states: Tensor
    logits: Tensor
    adapter: RowKeys
    decoder: RowKeys


class ForesightDrafter:
    """Head, adapter and decoder as one; without an adapter there is no prediction."""

    def __init__(
        self, drafter: BlockDrafter, decoder: TargetSlice | None, adapter: Adapter | None
    ) -> None:
        self.drafter, self.decoder, self.adapter = drafter, decoder, adapter

    def predict(self, context: Context, block: Tensor, starts: Tensor) -> Prediction:
        """Predicted states and laws of blocks [B, M, R] of tokens at `starts` [B, M]."""
        assert self.adapter is not None, "states are predicted by an adapter"
        assert self.decoder is not None
        count, rows = block.shape[1:]
        positions = block_positions(starts, rows)
        own = same_block(count, rows, block.device)[None]
        embedded = self.drafter.embed(block.flatten(1))
        states, adapter_keys = self.adapter(
            embedded, positions, own, _seen([part.adapter for part in context], context, rows)
        )
        decoder_keys = RowKeys()
        deepest = states[..., -embedded.shape[-1] :]
        final, _ = self.decoder(
            deepest,
            positions,
            own,
            _seen([part.decoder for part in context], context, rows),
            decoder_keys,
        )
        return Prediction(states, self.decoder.logits(final), adapter_keys, decoder_keys)

    def initial(
        self,
        history: Tensor,
        starts: Tensor,
        anchors: Tensor,
        drafts: int,
        block: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """[B, M, drafts] tokens that a first pass reads; arguments as of `first_inputs`."""
        head = self.drafter.config
        text = history if head.token_input else None
        return first_inputs(head, text, starts, anchors, drafts, block, lengths)

    def draft(
        self,
        context: Context,
        anchors: Tensor,
        starts: Tensor,
        initial: Tensor,
        plan: RefinePlan,
        early_stop: bool = True,
    ) -> Refined[Tensor]:
        """Draft and refine blocks behind `anchors` at `starts`, both [B, M]; rows are B * M.

        initial: [B, M, g], what the first pass reads (noise or masks). early_stop: see `refine`.
        """
        shape = anchors.shape
        rows = initial.shape[2] + 1
        seen = _seen([part.head for part in context], context, rows)

        def draft(block: Tensor, frozen: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
            block, frozen = block.view(*shape, rows), frozen.view(shape)
            tokens, logprobs = self.drafter.draft(block, starts, seen, frozen, states)
            return tokens.flatten(0, 1), logprobs.flatten(0, 1)

        def refresh(block: Tensor) -> tuple[Tensor, Tensor]:
            found = self.predict(context, block.view(*shape, rows), starts)
            return found.states, found.logits.argmax(-1).view(-1, rows)

        return refine(
            anchors.flatten(), initial.flatten(0, 1), plan, draft, refresh, early_stop=early_stop
        )

    def suffix(self, found: Prediction, starts: Tensor, lengths: Tensor) -> Part:
        """A predicted block at `starts` [B, 1], each of M outcomes seeing its `lengths` [B, M]
        accepted drafts and the anchor before them."""
        rows = found.states.shape[1]
        head = self.drafter.context_keys(found.states, block_positions(starts, rows))
        visible = torch.arange(rows, device=starts.device) <= lengths.unsqueeze(2)
        return Part(head, found.decoder, found.adapter, visible)

    def draft_ahead(
        self,
        context: Context,
        starts: Tensor,
        found: Prediction,
        outcomes: Outcomes,
        initial: Tensor,
        plan: RefinePlan,
        early_stop: bool = True,
    ) -> Refined[Tensor]:
        """Draft behind M outcomes of a block at `starts` [B, 1] that is still being verified.

        found: `predict`'s answer for that block. All outcomes are one batch; outcome k sees the
        rows up to k of the one predicted suffix. Rows of the result are B * M.
        """
        lengths = outcomes.lengths
        parts = [part.blocks(lengths.shape[1]) for part in context]
        parts.append(self.suffix(found, starts, lengths))
        return self.draft(parts, outcomes.anchors, starts + lengths + 1, initial, plan, early_stop)

    def adapter_keys(
        self, context: Context, tokens: Tensor, states: Tensor, positions: Tensor
    ) -> RowKeys:
        """The adapter's keys of committed rows [B, R], whose `states` [B, R, T*H] are true."""
        assert self.adapter is not None
        rows = tokens.shape[1]
        own = same_block(1, rows, tokens.device)[None]
        seen = _seen([part.adapter for part in context], context, rows)
        found: tuple[Tensor, RowKeys] = self.adapter(
            self.drafter.embed(tokens), positions, own, seen, given=states
        )
        return found[1]


def _seen(keys: Sequence[Keys | None], context: Context, rows: int) -> list[Seen]:
    """One network's `keys` of each part, for blocks of `rows` rows."""
    return [
        Seen(found, part.visible.repeat_interleave(rows, dim=1))
        for found, part in zip(keys, context, strict=True)
        if found is not None
    ]
