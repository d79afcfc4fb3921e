"""Attention of token trees over paged KV: one launch for a batch of requests.

A request brings P query rows. All of them see its committed prefix, whose KV lies in a paged pool,
and each sees the local rows its bitmask names: C rows of fresh KV, of which the queries are the
last P. Verification has C = P = N: the nodes of the tree. A foresight batch has C = S + P: the S
predicted rows that all candidate blocks share, then the blocks themselves, so that the prefix is
read once for all of them and a block's visible share of the suffix is a matter of its bits.

Memory: the prefix is split over programs (flash decoding), so that one long request fills a GPU; a
second kernel joins the parts. No dense mask exists anywhere.

B requests, P query rows, C local rows, W = ceil(C / 32) mask words, Hq and Hkv heads with
G = Hq / Hkv, D head size, R table rows, S splits.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_jetspec.kernels.tree_attention import arguments

REDUCE_ROWS = 16
LOG2_E = math.log2(math.e)


@triton.jit
def _fold(
    q,
    k,
    v,
    visible,
    scores_max,
    weights,
    acc,
    scale,
    cap,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of the online softmax, in base 2. visible: [BLOCK_M, BLOCK_N]."""
    if WIDEN:
        q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(q, k, input_precision="tf32x3") * scale
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1; `scale` is the plain one here.
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1) * 1.4426950408889634
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(scores_max, tl.max(scores, 1))
    # A row that has seen nothing yet keeps -inf; subtracting it would give NaN.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay = tl.exp2(scores_max - shift)
    p = tl.exp2(scores - shift[:, None])
    low = p.to(v.dtype)
    if WIDEN:
        p, v = low.to(tl.float32), v.to(tl.float32)
        low = p
    weights = weights * decay + tl.sum(p, 1)
    acc = tl.dot(low, v, acc * decay[:, None], input_precision="tf32x3")
    return new_max, weights, acc


@triton.jit
def attend(
    q_ptr,
    local_k_ptr,
    local_v_ptr,
    pool_k_ptr,
    pool_v_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    mask_ptr,
    positions_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_batch,
    q_row,
    local_k_batch,
    local_k_row,
    local_v_batch,
    local_v_row,
    pool_k_slot,
    pool_v_slot,
    table_row,
    n_queries,
    n_local,
    n_words,
    n_heads_kv,
    scale,
    cap,
    window,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stage 1. Grid: (query tiles, B * Hkv, splits).

    The rows of a tile are (query, head of the group) pairs, so that K and V are read once a group.
    Split s takes positions [s * chunk, (s + 1) * chunk) of the prefix; the last one also takes the
    local rows, which count as positions after the prefix when the chunk is sized.
    """
    tile = tl.program_id(0)
    request = tl.program_id(1) // n_heads_kv
    head_kv = tl.program_id(1) % n_heads_kv
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lens_ptr + request).to(tl.int32)
    table = table_ptr + tl.load(rows_ptr + request).to(tl.int64) * table_row

    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    live = pair < n_queries * GROUP
    query = tl.minimum(pair // GROUP, n_queries - 1)
    head = head_kv * GROUP + pair % GROUP
    dim = tl.arange(0, HEAD)
    column = tl.arange(0, BLOCK_N)
    q = tl.load(
        q_ptr
        + request.to(tl.int64) * q_batch
        + (query * q_row + head * HEAD)[:, None]
        + dim[None, :],
        mask=live[:, None],
        other=0.0,
    )
    local_positions = positions_ptr + request * n_local
    position = length
    oldest = 0
    if WINDOWED:
        position = tl.load(local_positions + n_local - n_queries + query).to(tl.int32)
        oldest = tl.maximum(tl.min(position) - window, 0)

    # The first visible position and the local rows bound what the splits share.
    span = length - oldest + n_local
    chunk = tl.cdiv(tl.cdiv(span, splits), BLOCK_N) * BLOCK_N
    start = tl.minimum(oldest + split * chunk, length)
    end = tl.minimum(start + chunk, length)

    scores_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    for first in range(start, end, BLOCK_N):
        at = first + column
        inside = at < end
        if PAGE == 1:
            slot = tl.load(table + at, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64)
            slot = page * PAGE + at % PAGE
        k = tl.load(
            pool_k_ptr + (slot * pool_k_slot + head_kv * HEAD)[None, :] + dim[:, None],
            mask=inside[None, :],
            other=0.0,
        )
        v = tl.load(
            pool_v_ptr + (slot * pool_v_slot + head_kv * HEAD)[:, None] + dim[None, :],
            mask=inside[:, None],
            other=0.0,
        )
        visible = live[:, None] & inside[None, :]
        if WINDOWED:
            visible &= at[None, :] >= (position - window)[:, None]
        scores_max, weights, acc = _fold(
            q, k, v, visible, scores_max, weights, acc, scale, cap, CAPPED, WIDEN
        )

    if split == splits - 1:
        words = mask_ptr + (request * n_queries + query) * n_words
        local_k = local_k_ptr + request.to(tl.int64) * local_k_batch + head_kv * HEAD
        local_v = local_v_ptr + request.to(tl.int64) * local_v_batch + head_kv * HEAD
        for first in range(0, n_local, BLOCK_N):
            at = first + column
            inside = at < n_local
            k = tl.load(
                local_k + (at * local_k_row)[None, :] + dim[:, None],
                mask=inside[None, :],
                other=0.0,
            )
            v = tl.load(
                local_v + (at * local_v_row)[:, None] + dim[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            word = tl.load(
                words[:, None] + (at // 32)[None, :],
                mask=live[:, None] & inside[None, :],
                other=0,
            )
            visible = ((word >> (at % 32)[None, :]) & 1) != 0
            if WINDOWED:
                place = tl.load(local_positions + at, mask=inside, other=0).to(tl.int32)
                visible &= place[None, :] >= (position - window)[:, None]
            scores_max, weights, acc = _fold(
                q, k, v, visible, scores_max, weights, acc, scale, cap, CAPPED, WIDEN
            )

    seen = weights > 0
    normal = acc / tl.where(seen, weights, 1.0)[:, None]
    row = ((request * n_queries + query) * n_heads_kv * GROUP + head).to(tl.int64)
    if SPLIT:
        row += split * tl.num_programs(1).to(tl.int64) * n_queries * GROUP
        lse = tl.where(seen, scores_max + tl.log2(tl.where(seen, weights, 1.0)), float("-inf"))
        tl.store(lse_ptr + row, lse, mask=live)
        # Parts of weight zero are never read.
        tl.store(
            partial_ptr + row[:, None] * HEAD + dim[None, :],
            normal,
            mask=(live & seen)[:, None],
        )
    else:
        tl.store(out_ptr + row[:, None] * HEAD + dim[None, :], normal, mask=live[:, None])


@triton.jit
def reduce(
    partial_ptr, lse_ptr, out_ptr, n_rows, splits, HEAD: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Stage 2: the splits' parts of each (query, head) row, weighted by their sums.

    Grid: (ceil(B * P * Hq / BLOCK_R),).
    """
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    live = row < n_rows
    dim = tl.arange(0, HEAD)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, HEAD], tl.float32)
    at = row
    for _ in range(0, splits):
        lse = tl.load(lse_ptr + at, mask=live, other=float("-inf"))
        seen = lse > float("-inf")
        part = tl.load(
            partial_ptr + at[:, None] * HEAD + dim[None, :], mask=seen[:, None], other=0.0
        )
        new_top = tl.maximum(top, lse)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - shift)
        weight = tl.exp2(lse - shift)
        weights = weights * decay + weight
        acc = acc * decay[:, None] + part * weight[:, None]
        top = new_top
        at += n_rows
    acc = acc / tl.where(weights > 0, weights, 1.0)[:, None]
    tl.store(out_ptr + row[:, None] * HEAD + dim[None, :], acc, mask=live[:, None])


@cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def choose_splits(programs: int, resident: int, longest: int) -> int:
    """Into how many parts to cut the prefix, so that one wave of programs fills the GPU.

    programs: of one part. resident: programs that run at once; more parts than that add traffic of
    partial results and no parallelism. longest: upper bound of a prefix, known on the host; no
    part is cut below 256 positions of it. The result depends on shapes alone, so that a captured
    graph serves every length.
    """
    return max(1, min(resident // max(programs, 1), triton.cdiv(longest, 256)))


def choose_tile(dtype: torch.dtype, head_size: int, rows: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N) for `rows` = P * G rows a KV head.

    The largest that keep accumulators in registers; fp32 is multiplied in three tf32 parts, whose
    operands take more.
    """
    if dtype is torch.float32:
        largest, block_n = 32, 32
    elif head_size > 128:
        largest, block_n = 64, 32
    else:
        largest, block_n = 128, 64
    return max(16, min(triton.next_power_of_2(rows), largest)), block_n


def choose_warps(dtype: torch.dtype, block_m: int) -> int:
    return 8 if block_m > 64 or dtype is torch.float32 else 4


def tree_attention(
    queries: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_table: Tensor,
    table_rows: Tensor,
    prefix_lens: Tensor,
    mask_words: Tensor,
    *,
    scale: float,
    window: int | None = None,
    positions: Tensor | None = None,
    logit_cap: float = 0.0,
    page_size: int = 1,
    splits: int | None = None,
    tile: tuple[int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every query over its request's prefix and its own local rows.

    Args:
        queries: [B, P, Hq, D], heads and dimensions contiguous; bf16, fp16 or fp32; D 64, 128 or
            256 (16 and 32 also work).
        local_keys, local_values: [B, C, Hkv, D], likewise; the queries are the last P of the C.
        key_pool, value_pool: [slots, Hkv, D], likewise.
        slot_table: [R, X] int32: of a request's row, column p holds the slot of position p, or with
            `page_size` > 1 the page of positions p * page_size and on.
        table_rows: [B] integer, row of the table; requests may share one.
        prefix_lens: [B] integer, 0 and up: leading positions of the row that all queries see.
        mask_words: [B, P, ceil(C / 32)] int32; bit j of word w: the query sees local row 32 w + j.
        scale: of the scores.
        window: a query at position p sees keys from p - window on. None: all.
        positions: [B, C] int64, absolute positions of the local rows; needed with `window`.
        logit_cap: c > 0 bends scores to c * tanh(score / c); 0: off.
        splits: parts of a prefix; None: chosen from the shapes.
        tile: rows (P * G) and columns of one program's tile; None: chosen from the shapes.
        out: [B, P, Hq, D] contiguous, to write to.

    Returns:
        [B, P, Hq, D] of the queries' type. A query that sees nothing gets 0.

    Raises:
        ValueError: a shape, type or layout the kernel does not serve.
    """
    windowed, capped = window is not None and window >= 0, logit_cap > 0
    arguments.check_values(queries, local_keys, local_values, key_pool, value_pool, mask_words)
    arguments.check_addresses(queries, slot_table, table_rows, prefix_lens, out)
    if windowed:
        arguments.check_positions(positions, local_keys)
    batch, n_queries, heads, head_size = queries.shape
    n_local, heads_kv = local_keys.shape[1:3]
    group = heads // heads_kv
    block_m, block_n = tile or choose_tile(queries.dtype, head_size, n_queries * group)
    tiles = triton.cdiv(n_queries * group, block_m)
    if splits is None:
        longest = slot_table.shape[1] * page_size
        # The registers of a multiprocessor hold one program of 8 warps, or two of 4.
        resident = _multiprocessors(queries.device) * 8 // choose_warps(queries.dtype, block_m)
        splits = choose_splits(tiles * batch * heads_kv, resident, longest)
    if out is None:
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    rows = batch * n_queries * heads
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty(splits, rows, head_size, dtype=torch.float32, device=out.device)
        lse = torch.empty(splits, rows, dtype=torch.float32, device=out.device)
    attend[(tiles, batch * heads_kv, splits)](
        queries,
        local_keys,
        local_values,
        key_pool,
        value_pool,
        slot_table,
        table_rows,
        prefix_lens,
        mask_words,
        positions if windowed else prefix_lens,
        out,
        partial,
        lse,
        *queries.stride()[:2],
        *local_keys.stride()[:2],
        *local_values.stride()[:2],
        key_pool.stride(0),
        value_pool.stride(0),
        slot_table.stride(0),
        n_queries,
        n_local,
        mask_words.shape[2],
        heads_kv,
        scale if capped else scale * LOG2_E,
        logit_cap,
        window if windowed else 0,
        GROUP=group,
        HEAD=head_size,
        PAGE=page_size,
        WINDOWED=windowed,
        CAPPED=capped,
        SPLIT=splits > 1,
        # Triton's interpreter multiplies bf16 operands as integers, and truncates to bf16.
        WIDEN=queries.device.type == "cpu",
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=choose_warps(queries.dtype, block_m),
        num_stages=2,
    )
    if splits > 1:
        grid = (triton.cdiv(rows, REDUCE_ROWS),)
        reduce[grid](partial, lse, out, rows, splits, HEAD=head_size, BLOCK_R=REDUCE_ROWS)
    return out
