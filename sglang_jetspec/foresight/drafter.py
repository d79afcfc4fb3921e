"""One pass of a draft head over blocks whose front may be replaced by refreshed states.

Shapes: B rows, g drafts, C context positions, T captured layers, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.heads.reference import JetSpecHead


@dataclass
class DraftContext:
    """Fused target states by position, true or predicted.

    A block at position n sees the valid positions before n: `valid` is False where a state is
    missing, as in drafting with stale states.
    """

    fused: Tensor  # [B, C, H]
    valid: Tensor  # [B, C] bool

    def write(self, positions: Tensor, fused: Tensor) -> None:
        """Store fused states [B, R, H] at `positions` [B, R] and make them valid."""
        index = positions.unsqueeze(-1).expand_as(fused)
        self.fused.scatter_(1, index, fused.to(self.fused.dtype))
        self.valid.scatter_(1, positions, True)

    def with_states(self, positions: Tensor, fused: Tensor) -> DraftContext:
        """A copy with `fused` at `positions`; the original stays as it is."""
        copy = DraftContext(self.fused.clone(), self.valid.clone())
        copy.write(positions, fused)
        return copy

    def without(self, positions: Tensor, hidden: Tensor) -> DraftContext:
        """A view in which those of `positions` [B, R] marked in `hidden` [B, R] are missing."""
        valid = self.valid.scatter(1, positions, self.valid.gather(1, positions) & ~hidden)
        return DraftContext(self.fused, valid)


class BlockDrafter:
    """A causal head with the embedding and LM head that it borrows from its target.

    embedding: [V, H]. lm_head: [V, H], or its rows of the draft vocabulary if `draft_token_ids`.
    """

    def __init__(
        self,
        head: JetSpecHead,
        embedding: Tensor,
        lm_head: Tensor,
        draft_token_ids: Tensor | None = None,
    ) -> None:
        self.head, self.embedding, self.lm_head = head, embedding, lm_head
        self.draft_token_ids = draft_token_ids

    def draft(
        self,
        context: DraftContext,
        starts: Tensor,
        block: Tensor,
        frozen: Tensor,
        states: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Best tokens [B, g] int64 and their log-probabilities [B, g] fp32.

        starts: [B] position of the block's row 0. block: [B, g+1] tokens. frozen: [B], the row
        that acts as anchor; rows before it enter as `states` [B, g+1, T*H] (None: as what
        `context` holds). Drafts up to `frozen` have no meaning.
        """
        rows = block.shape[1]
        steps = torch.arange(rows, device=block.device)
        positions = starts[:, None] + steps
        if states is not None:
            context = context.with_states(positions, self.head.fuse(states))
        mask = _refined_block_mask(context, starts, frozen, rows)
        embedded = F.embedding(block, self.embedding)
        hidden = self.head.attend(embedded, positions, context.fused, mask)
        shift = self.head.config.draft_shift
        logits = F.linear(hidden[:, :-1] if shift else hidden[:, 1:], self.lm_head).float()
        best, tokens = logits.max(-1)
        if self.draft_token_ids is not None:
            tokens = self.draft_token_ids.long()[tokens]
        return tokens, best - logits.logsumexp(-1)


def _refined_block_mask(context: DraftContext, starts: Tensor, frozen: Tensor, rows: int) -> Tensor:
    """[B, rows, C + rows]: rows from the anchor on see the context before it and each other.

    Rows before the anchor see only themselves, which keeps their (unused) output finite.
    """
    stored = torch.arange(context.valid.shape[1], device=starts.device)
    steps = torch.arange(rows, device=starts.device)
    active = steps >= frozen[:, None]  # [B, rows]
    visible = context.valid & (stored < (starts + frozen)[:, None])
    before = visible[:, None, :] & active[:, :, None]
    within = (steps[:, None] >= steps) & active[:, None, :]
    own = within | torch.eye(rows, dtype=torch.bool, device=starts.device)
    return torch.cat([before, own], dim=-1)
