"""Noise tokens: what fills a block's rows before anything has been guessed for them.

Each is drawn uniformly from the text up to and including the anchor (JetSpec++ paper, appendix E).
A server's draw is a hash of the anchor's position: a request's blocks do not depend on its
neighbours, and all ranks fill alike.

Shapes: B requests, M blocks a request, P positions, g drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.verification.seeds import murmur_hash

_RANGE = float(1 << 32)


def noise_tokens(
    history: Tensor,
    starts: Tensor,
    anchors: Tensor,
    count: int,
    block: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """[B, M, count] int64 noise for blocks behind `anchors` [B, M].

    history: [B, P] tokens, of which those before `starts` [B] are read. Anchors stand at `starts`
    (M = 1), or, behind `lengths` [B, M] accepted drafts of a `block` [B, g+1] that starts there.
    """
    ends = starts[:, None] if lengths is None else starts[:, None] + lengths + 1
    hashed = murmur_hash(torch.zeros_like(ends).flatten(), ends.flatten(), count)
    uniform = hashed.view(*ends.shape, count) / _RANGE
    index = (uniform * (ends + 1).unsqueeze(2)).long().minimum(ends.unsqueeze(2))
    tokens = _gathered(history, index)
    if block is not None:
        inside = index - starts[:, None, None]
        tokens = _gathered(block, inside).where(inside >= 0, tokens)
    return torch.where(index == ends.unsqueeze(2), anchors.unsqueeze(2), tokens).long()


def first_inputs(
    head: HeadConfig,
    history: Tensor | None,
    starts: Tensor,
    anchors: Tensor,
    count: int,
    block: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """[B, M, count] tokens behind `anchors` that a head's first pass reads: noise, or masks.

    history: None for heads that read masks. Arguments as of `noise_tokens`.
    """
    if history is None:
        return anchors.new_full((*anchors.shape, count), head.mask_token_id)
    return noise_tokens(history, starts, anchors, count, block, lengths)


def training_noise(
    history: Tensor, lengths: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """[B, count] tokens drawn uniformly from each sequence up to and including its anchor.

    history: [B, C] int64 token ids. lengths: [B] tokens of each row that count, >= 1.
    """
    shape = (len(history), count)
    uniform = torch.rand(shape, generator=generator, device=generator.device).to(history.device)
    picked = (uniform * lengths[:, None]).long().clamp(max=history.shape[1] - 1)
    return history.gather(1, picked.minimum(lengths[:, None] - 1))


def _gathered(text: Tensor, index: Tensor) -> Tensor:
    inside = index.flatten(1).clamp(0, text.shape[1] - 1)
    return text.gather(1, inside).view_as(index)
