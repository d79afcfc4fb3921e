"""Drafting with foresight: blocks behind true or predicted states, for one outcome or for many.

Shapes: B requests, M outcomes, g drafts, P positions, T captured layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.foresight.adapter import Adapter
from sglang_jetspec.foresight.decoder import TargetSlice
from sglang_jetspec.foresight.drafter import BlockDrafter, DraftContext
from sglang_jetspec.foresight.layers import LayerCache
from sglang_jetspec.foresight.outcomes import Outcomes
from sglang_jetspec.foresight.refine import Refined, RefinePlan, noise_tokens, refine


@dataclass
class DraftState:
    """What drafting knows of B requests, by position. Rows of tokens that are still being verified
    are predictions, which the commit overwrites."""

    history: Tensor  # [B, P] int64 tokens
    context: DraftContext
    decoder_cache: LayerCache
    adapter_cache: LayerCache | None

    def repeat(self, times: int) -> DraftState:
        """A copy with every request `times` times in place."""
        context = DraftContext(
            self.context.fused.repeat_interleave(times, dim=0),
            self.context.valid.repeat_interleave(times, dim=0),
        )
        return DraftState(
            self.history.repeat_interleave(times, dim=0),
            context,
            self.decoder_cache.repeat(times),
            self.adapter_cache and self.adapter_cache.repeat(times),
        )


class ForesightDrafter:
    """Head, adapter and decoder as one; without an adapter there is no prediction."""

    def __init__(
        self,
        drafter: BlockDrafter,
        decoder: TargetSlice,
        adapter: Adapter | None,
        embedding: Tensor,
    ) -> None:
        self.drafter, self.decoder, self.adapter = drafter, decoder, adapter
        self.embedding = embedding  # [V, H]
        self.rows = drafter.head.config.block_size
        self.hidden_size = embedding.shape[1]

    def make_state(self, history: Tensor) -> DraftState:
        """Empty caches for the requests of `history` [B, P]."""
        count, positions = history.shape
        context = DraftContext(
            self.embedding.new_zeros(count, positions, self.hidden_size),
            torch.zeros(count, positions, dtype=torch.bool, device=history.device),
        )
        return DraftState(
            history,
            context,
            self.decoder.make_cache(count, positions),
            None if self.adapter is None else self.adapter.make_cache(count, positions),
        )

    def block_positions(self, starts: Tensor) -> Tensor:
        """[B] positions of row 0 -> [B, g+1]."""
        return starts[:, None] + torch.arange(self.rows, device=starts.device)

    def predict(self, state: DraftState, block: Tensor, positions: Tensor) -> Tensor:
        """Predicted captured states [B, R, T*H] of the tokens `block` [B, R] at `positions`."""
        assert self.adapter is not None, "states are predicted by an adapter"
        embedded = F.embedding(block, self.embedding)
        states: Tensor = self.adapter(embedded, positions, state.adapter_cache)
        return states

    def decode(self, state: DraftState, states: Tensor, positions: Tensor) -> Tensor:
        """Estimated target logits [B, R, V] fp32 behind rows with predicted `states`."""
        deepest = states[..., -self.hidden_size :]
        final, _ = self.decoder(deepest, positions, state.decoder_cache)
        return self.decoder.logits(final)

    def commit(self, state: DraftState, states: Tensor, positions: Tensor) -> None:
        """True `states` [B, R, T*H] replace the predictions at `positions` [B, R]."""
        state.context.write(positions, self.drafter.head.fuse(states))
        self.decoder.commit(states[..., -self.hidden_size :], positions, state.decoder_cache)
        if self.adapter is not None:
            assert state.adapter_cache is not None
            embedded = F.embedding(state.history.gather(1, positions), self.embedding)
            self.adapter.commit(embedded, states, positions, state.adapter_cache)

    def draft(
        self, state: DraftState, starts: Tensor, plan: RefinePlan, generator: torch.Generator
    ) -> Refined[Tensor]:
        """Draft and refine a block behind the anchor at `starts` [B] of each request."""
        head = self.drafter.head.config
        anchors = state.history.gather(1, starts[:, None]).squeeze(1)
        drafts = self.rows - 1
        if head.token_input:
            initial = noise_tokens(state.history, starts + 1, drafts, generator)
        else:
            initial = anchors.new_full((len(anchors), drafts), head.mask_token_id)
        positions = self.block_positions(starts)

        def draft(block: Tensor, frozen: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.drafter.draft(state.context, starts, block, frozen, states)

        def refresh(block: Tensor) -> tuple[Tensor, Tensor]:
            states = self.predict(state, block, positions)
            return states, self.decode(state, states, positions).argmax(-1)

        return refine(anchors, initial, plan, draft, refresh)

    def draft_ahead(
        self,
        state: DraftState,
        starts: Tensor,
        block: Tensor,
        states: Tensor,
        outcomes: Outcomes,
        plan: RefinePlan,
        generator: torch.Generator,
    ) -> Tensor:
        """Draft behind M outcomes of a block that is still being verified: [B, M, g] int64.

        starts: [B] position of the block's anchor. block: [B, g+1] anchor and drafts. states:
        [B, g+1, T*H] as of `predict`, whose rows (and `decode`'s) are in `state`. All outcomes are
        one batch; outcome k sees the rows up to k of the one predicted suffix, and `state` stays as
        it is.
        """
        times = outcomes.lengths.shape[1]
        positions = self.block_positions(starts).repeat_interleave(times, dim=0)
        ahead = state.repeat(times)
        fused = self.drafter.head.fuse(states).repeat_interleave(times, dim=0)
        ahead.context.write(positions, fused)
        ahead.history.scatter_(1, positions, block.repeat_interleave(times, dim=0))
        anchors_at = positions[:, 0] + outcomes.lengths.flatten() + 1
        ahead.history.scatter_(1, anchors_at[:, None], outcomes.anchors.flatten()[:, None])
        refined = self.draft(ahead, anchors_at, plan, generator)
        return refined.drafts.view(len(block), times, -1)
