"""What a round commits, moved to where it belongs, in one launch.

The KV of the accepted nodes moves to the front of its request's window, in all buffers (K and V of
every layer); their features are gathered into rows of their own. A program moves one span of
columns of one buffer for one request: it reads that span of all D + 1 rows before it writes any,
so that source and destination rows may overlap in any order, and no two programs share a byte.

B requests, N window slots (tree nodes), D depth, F feature columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_BYTES = 32 * 1024  # in registers between the reads and the writes
WORDS = {8: (torch.int64, tl.int64), 4: (torch.int32, tl.int32), 2: (torch.int16, tl.int16)}


@triton.jit
def _commit(
    path,
    window,
    prefix_lens,
    buffers,
    features,
    features_out,
    positions_out,
    slots_out,
    N,
    STEPS,
    context_len,
    kv_words,
    kv_spans,
    moved_spans,
    feature_words,
    WORD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SPAN: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    step = tl.arange(0, BLOCK_S)
    node = tl.load(path + request * STEPS + step, mask=step < STEPS, other=-1)
    kept = node >= 0
    node = tl.maximum(node, 0)
    if span < moved_spans:
        base = tl.load(buffers + span // kv_spans).to(tl.pointer_type(WORD))
        base = tl.multiple_of(base, 16)
        column = (span % kv_spans) * SPAN + tl.arange(0, SPAN)
        source = tl.load(window + request * N + node)
        target = tl.load(window + request * N + step, mask=step < N, other=0)
        moves = (kept & (source != target))[:, None] & (column < kv_words)[None, :]
        rows = tl.load(base + (source * kv_words)[:, None] + column[None, :], mask=moves)
        tl.debug_barrier()  # all warps have read
        tl.store(base + (target * kv_words)[:, None] + column[None, :], rows, mask=moves)
    else:
        column = (span - moved_spans) * SPAN + tl.arange(0, SPAN)
        inside = (step < STEPS)[:, None] & (column < feature_words)[None, :]
        source = (request * N + node) * feature_words
        rows = tl.load(features + source[:, None] + column[None, :], mask=inside)
        out = request * STEPS + step
        at = (out * feature_words)[:, None] + column[None, :]
        tl.store(features_out + at, rows, mask=inside)
        if span == moved_spans:
            position = tl.load(prefix_lens + request) + step
            position = tl.minimum(position, context_len - 1)
            tl.store(positions_out + out, position.to(tl.int64), mask=step < STEPS)
            slot = tl.load(window + request * N + step, mask=kept & (step < N), other=0)
            tl.store(slots_out + out, slot, mask=step < STEPS)


@dataclass(frozen=True)
class Committed:
    """One row a step of each path; past its end, padding: slot 0 and the root's features.

    features: [B * (D + 1), F]. positions, slots: [B * (D + 1)] int64.
    """

    features: Tensor
    positions: Tensor
    slots: Tensor


def buffer_table(buffers: Sequence[Tensor]) -> Tensor:
    """[n] int64 addresses of contiguous KV buffers, each [slots, row...], of one row size."""
    return torch.tensor(
        [b.data_ptr() for b in buffers], dtype=torch.int64, device=buffers[0].device
    )


def commit(
    path: Tensor,
    window: Tensor,
    prefix_lens: Tensor,
    context_len: int,
    buffers: Tensor,
    row_bytes: int,
    features: Tensor,
) -> Committed:
    """Move the accepted KV and gather the accepted features.

    Args:
        path: [B, D + 1] int64, accepted nodes, root first, then -1 (`Acceptance.path`).
        window: [B, N] int64, slot of each node; the first D + 1 are where the path belongs.
        prefix_lens: [B] int64, committed lengths before the round.
        context_len: positions end below it.
        buffers: `buffer_table` of the KV buffers, 16-byte aligned. row_bytes: of one slot.
        features: [B * N, F], of the verified rows.
    """
    batch, steps = path.shape
    nodes = window.shape[1]
    features = features.contiguous()
    feature_bytes = features.shape[1] * features.element_size()
    size = next(s for s in WORDS if row_bytes % s == 0 and feature_bytes % s == 0)
    torch_word, word = WORDS[size]
    rows = features.view(torch_word)
    out = torch.empty(batch * steps, rows.shape[1], dtype=torch_word, device=rows.device)
    positions, slots = (path.new_empty(batch * steps) for _ in range(2))
    block_s = triton.next_power_of_2(steps)
    widest = max(row_bytes, feature_bytes) // size
    span = min(max(TILE_BYTES // (size * block_s), 16), triton.next_power_of_2(widest))
    kv_spans = triton.cdiv(row_bytes // size, span)
    moved_spans = len(buffers) * kv_spans
    _commit[(batch, moved_spans + triton.cdiv(rows.shape[1], span))](
        path.contiguous(),  # of several ranks it is a part of what they agreed on
        window.contiguous(),
        prefix_lens.contiguous(),
        buffers,
        rows,
        out,
        positions,
        slots,
        nodes,
        steps,
        context_len,
        row_bytes // size,
        kv_spans,
        moved_spans,
        rows.shape[1],
        WORD=word,
        BLOCK_S=block_s,
        SPAN=span,
        num_warps=4,
    )
    return Committed(out.view(features.dtype), positions, slots)
