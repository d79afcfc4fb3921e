"""Self-refinement of a drafted block, "Jn-Rm" (JetSpec++ paper, section 4.3 and appendix D).

J extra passes of the draft head follow the first one (J0); each reads the previous guesses. R of
them are preceded by a context refresh: the adapter and the decoder run over the guesses, the first
guess that the decoder's argmax disagrees with is replaced by that argmax (anchor replacement), the
tokens up to it are frozen, and the next pass redrafts behind it with the refreshed states of the
frozen tokens as context. Only the proposal changes, so that verification stays lossless.

Shapes: B rows (requests, or requests times outcomes), g drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

States = TypeVar("States")

# (block [B, g+1], frozen [B], refreshed states or None) -> drafts [B, g], log-probabilities [B, g].
# Row `frozen` of the block is the anchor; rows before it are read as refreshed states only. Drafts
# at positions <= frozen are not used.
Draft = Callable[[Tensor, Tensor, States | None], tuple[Tensor, Tensor]]

# block [B, g+1] -> refreshed states, the decoder's best token after each row [B, g+1].
Refresh = Callable[[Tensor], tuple[States, Tensor]]


@dataclass(frozen=True)
class RefinePlan:
    """passes: J. refreshes: R <= J, before the first R extra passes.

    replace: anchor replacement; without it a refresh freezes the tokens the decoder agrees with.
    """

    passes: int
    refreshes: int
    replace: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.refreshes <= self.passes:
            raise ValueError(
                f"R (refreshes) is {self.refreshes}, J (passes) is {self.passes}; use 0 <= R <= J"
            )


@dataclass(frozen=True)
class Refined(Generic[States]):
    """A block after refinement.

    frozen: [B] drafts that are fixed. passes: draft passes made, the first one included.
    """

    drafts: Tensor  # [B, g] int64
    logprobs: Tensor  # [B, g] fp32; 0 for a replaced token, which the head did not propose
    frozen: Tensor  # [B] int64
    passes: int


def refine(
    anchors: Tensor,
    initial: Tensor,
    plan: RefinePlan,
    draft: Draft[States],
    refresh: Refresh[States] | None = None,
    early_stop: bool = True,
) -> Refined[States]:
    """Draft a block and refine it.

    Args:
        anchors: [B] int64, the block's first token.
        initial: [B, g] int64, the first pass's inputs behind the anchor (noise tokens or masks).
        plan: J and R.
        draft: one pass of the head.
        refresh: adapter and decoder; needed when R > 0.
        early_stop: end when a pass or a refresh changes nothing, which reads a value back to the
            host; False keeps the number of passes fixed (for graphs).
    """
    frozen = torch.zeros_like(anchors)
    states: States | None = None
    drafts, logprobs = draft(_block(anchors, initial), frozen, None)
    done = 1
    for index in range(plan.passes):
        block = _block(anchors, drafts)
        if index < plan.refreshes:
            if refresh is None:
                raise ValueError("a plan with refreshes needs `refresh`")
            states, best = refresh(block)
            disagree = best[:, :-1] != drafts
            if early_stop and not disagree.any():
                break
            drafts, logprobs, frozen = _apply(plan, drafts, logprobs, best, disagree, frozen)
            block = _block(anchors, drafts)
        again, again_logprobs = draft(block, frozen, states)
        done += 1
        positions = torch.arange(1, drafts.shape[1] + 1, device=drafts.device)
        kept = positions <= frozen[:, None]
        unchanged = bool((again == drafts).masked_fill(kept, True).all()) if early_stop else False
        drafts = drafts.where(kept, again)
        logprobs = logprobs.where(kept, again_logprobs)
        if unchanged and index + 1 >= plan.refreshes:
            break
    return Refined(drafts, logprobs, frozen, done)


def _block(anchors: Tensor, drafts: Tensor) -> Tensor:
    return torch.cat([anchors[:, None], drafts], dim=1)


def _apply(
    plan: RefinePlan,
    drafts: Tensor,
    logprobs: Tensor,
    best: Tensor,
    disagree: Tensor,
    frozen: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Freeze up to the first disagreement, whose token the decoder's replaces if asked.

    A row without a disagreement is frozen whole.
    """
    count = drafts.shape[1]
    spot = torch.where(disagree.any(1), disagree.int().argmax(1), count)  # 0-based draft index
    if not plan.replace:
        return drafts, logprobs, frozen.maximum(spot)
    at = torch.arange(count, device=drafts.device) == spot[:, None]
    drafts = torch.where(at, best[:, :-1], drafts)
    return drafts, logprobs.masked_fill(at, 0.0), frozen.maximum((spot + 1).clamp(max=count))
