"""Which rows a row may attend to, as packed 32-bit words.

B requests, N query rows, C columns, W = ceil(C / 32) words. Bit j of word w of row i is set when
the row sees column 32 w + j; for a tree: when that node is an ancestor of i, or i itself.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD_BITS = 32


def mask_words(columns: int) -> int:
    """W, the words a row of ``columns`` bits takes."""
    return -(-columns // WORD_BITS)


@cache
def _bit_values(device: torch.device) -> Tensor:
    """[32] int64: 2**j, with bit 31 as the sign of an int32."""
    values = 1 << torch.arange(WORD_BITS, device=device)
    values[-1] *= -1
    return values


def pack_ancestors(ancestors: Tensor) -> Tensor:
    """[B, N, C] bool to [B, N, W] int32."""
    columns = ancestors.shape[-1]
    padded = pad(ancestors, (0, -columns % WORD_BITS))
    padded = padded.view(*ancestors.shape[:-1], mask_words(columns), WORD_BITS)
    words: Tensor = (padded * _bit_values(ancestors.device)).sum(-1)
    return words.int()


def block_words(rows: int, causal: bool, device: torch.device | str) -> Tensor:
    """[1, N, W] int32: a block whose rows see the rows before them and themselves, or all."""
    visible = torch.ones(1, rows, rows, dtype=torch.bool, device=device)
    return pack_ancestors(visible.tril() if causal else visible)


def suffix_block_mask(behind: Tensor, rows: int, suffix: int) -> Tensor:
    """The mask of a foresight batch: blocks that share a suffix, each causal behind a part of it.

    behind: [B, F] int64, how many of the suffix's rows each of the F blocks sees (JetSpec++, the
    candidates' accepted lengths). rows: of a block. suffix: S shared rows, before the blocks.
    Returns [B, F * rows, S + F * rows] bool.
    """
    batch, blocks = behind.shape
    device = behind.device
    shared = torch.arange(suffix, device=device) < behind.unsqueeze(2)
    shared = shared.repeat_interleave(rows, 1)
    index = torch.arange(blocks * rows, device=device)
    block = index // rows
    own = (block.unsqueeze(1) == block) & (index.unsqueeze(1) >= index)
    return torch.cat([shared, own.expand(batch, -1, -1)], 2)
