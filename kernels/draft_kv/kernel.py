"""The head's KV of committed positions: features to context states to K and V in the pool.

    context = RMSNorm(features @ fc^T) * norm
    K = rotate(RMSNorm_head(context @ Wk^T) * k_norm, position)        V = context @ Wv^T

for every draft layer (JetSpec paper, section on the causal draft head). Two launches: the
projection, whose every output column needs all features, and everything behind it. The second
never forms the normed context: RMSNorm scales whole rows, so that the scale is applied to the
product, and the sum of squares is gathered while the product is.

n rows, T taps, H hidden size, L draft layers, Hkv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 256  # above it the product is bound by arithmetic and a library's matmul is better
BLOCK_K = 128
PROJECTION_COLUMNS = 32  # 128 programs at H = 4096: about one a multiprocessor
HEAD_SIZES = (32, 64, 128, 256)
FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _dot(x, w, total, WIDEN: tl.constexpr):
    """total + x @ w^T. WIDEN: Triton's interpreter multiplies bf16 as integers, and truncates."""
    if WIDEN:
        x, w = x.to(tl.float32), w.to(tl.float32)
    return tl.dot(x, tl.trans(w), total, input_precision="ieee")


@triton.jit
def _project(
    features,
    weight,
    out,
    n,
    H,
    K,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [n, H] fp32 = features [n, K] @ weight [H, K]^T."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK)
    row_in, column_in = (row < n)[:, None], (column < H)[:, None]
    x_at = features + row.to(tl.int64)[:, None] * K + k[None, :]
    w_at = weight + column.to(tl.int64)[:, None] * K + k[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK):
        k_in = (first + k < K)[None, :]
        x = tl.load(x_at + first, mask=row_in & k_in, other=0.0)
        w = tl.load(w_at + first, mask=column_in & k_in, other=0.0)
        total = _dot(x, w, total, WIDEN)
    at = out + row.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(at, total, mask=row_in & (column < H)[None, :])


@triton.jit
def _write_kv(
    context,
    norm,
    addresses,
    cos_sin,
    positions,
    slots,
    n,
    H,
    context_eps,
    head_eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TYPE: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """K or V of one head of one layer, for BLOCK_M rows."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    layer = tl.program_id(1) // (2 * HEADS)
    is_value = (tl.program_id(1) // HEADS) % 2
    head = tl.program_id(1) % HEADS
    table = addresses + layer * 5
    weight = tl.load(table + is_value).to(tl.pointer_type(TYPE))
    weight = tl.multiple_of(weight, 16)
    pool = tl.load(table + 3 + is_value).to(tl.pointer_type(TYPE))
    pool = tl.multiple_of(pool, 16)

    k = tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    row_in = row < n
    x_at = context + row.to(tl.int64)[:, None] * H + k[None, :]
    low_at = weight + (head * 2 * HALF + half).to(tl.int64)[:, None] * H + k[None, :]
    high_at = low_at + HALF * H
    squares = tl.zeros((BLOCK_M,), tl.float32)
    low = tl.zeros((BLOCK_M, HALF), tl.float32)
    high = tl.zeros((BLOCK_M, HALF), tl.float32)
    for first in range(0, H, BLOCK):
        k_in = first + k < H
        x = tl.load(x_at + first, mask=row_in[:, None] & k_in[None, :], other=0.0)
        squares += tl.sum(x * x, 1)
        scale = tl.load(norm + first + k, mask=k_in, other=0.0).to(tl.float32)
        x *= scale[None, :]
        if not WIDEN:
            x = x.to(TYPE)
        w = tl.load(low_at + first, mask=k_in[None, :], other=0.0)
        low = _dot(x, w, low, WIDEN)
        w = tl.load(high_at + first, mask=k_in[None, :], other=0.0)
        high = _dot(x, w, high, WIDEN)
    row_scale = tl.rsqrt(squares / H + context_eps)[:, None]
    low *= row_scale
    high *= row_scale
    if is_value == 0:
        k_norm = tl.load(table + 2).to(tl.pointer_type(TYPE))
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
        head_scale = tl.rsqrt(mean + head_eps)[:, None]
        low *= head_scale * tl.load(k_norm + half).to(tl.float32)[None, :]
        high *= head_scale * tl.load(k_norm + HALF + half).to(tl.float32)[None, :]
        position = tl.load(positions + row, mask=row_in, other=0)
        turn = cos_sin + position[:, None] * (2 * HALF) + half[None, :]
        cos = tl.load(turn).to(tl.float32)
        sin = tl.load(turn + HALF).to(tl.float32)
        low, high = low * cos - high * sin, high * cos + low * sin
    slot = tl.load(slots + row, mask=row_in, other=0)
    at = pool + (slot * HEADS + head)[:, None] * (2 * HALF) + half[None, :]
    tl.store(at, low.to(TYPE), mask=row_in[:, None])
    tl.store(at + HALF, high.to(TYPE), mask=row_in[:, None])


@dataclass(frozen=True)
class ContextWeights:
    """What turns features into KV; all tensors of one dtype, contiguous and 16-byte aligned.

    fc: [H, T * H]. norm: [H], of the projected states. keys, values: per layer [Hkv * D, H].
    key_norms: per layer [D]. cos_sin: [P, D] fp32, cosines of the D / 2 angles of a position, then
    their sines (rotation in halves). context_eps, head_eps: of the two norms.
    """

    fc: Tensor
    norm: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    key_norms: Sequence[Tensor]
    cos_sin: Tensor
    context_eps: float
    head_eps: float

    def addresses(self, key_pools: Iterable[Tensor], value_pools: Iterable[Tensor]) -> Tensor:
        """[L, 5] int64: where each layer's weights and [slots, Hkv, D] pools lie.

        Raises ValueError for a tensor of another type than `fc`, or one that is not contiguous.
        """
        names = ("keys", "values", "key_norms", "key pool", "value pool")
        columns = (self.keys, self.values, self.key_norms, key_pools, value_pools)
        rows = []
        for layer, tensors in enumerate(zip(*columns, strict=True)):
            for name, x in zip(names, tensors, strict=True):
                if x.dtype is not self.fc.dtype or not x.is_contiguous():
                    raise ValueError(
                        f"{name} of layer {layer}: {x.dtype} with strides {x.stride()}: must be "
                        f"contiguous {self.fc.dtype}"
                    )
            rows.append([x.data_ptr() for x in tensors])
        return torch.tensor(rows, dtype=torch.int64, device=self.fc.device)


def serves(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel has a tile for heads of that size."""
    return head_dim in HEAD_SIZES and dtype in FLOATS


def write_block(block: int, rows: int, head_dim: int) -> int:
    """Columns of the context a step of the second kernel takes; wide tiles spill registers."""
    return block // 2 if head_dim == 256 or rows == 64 else block


def draft_kv(
    features: Tensor,
    positions: Tensor,
    slots: Tensor,
    weights: ContextWeights,
    addresses: Tensor,
    heads: int,
    head_dim: int,
) -> None:
    """Write K and V of n committed positions at their slots, in every layer.

    Args:
        features: [n, T * H] captured target states, contiguous.
        positions: [n] int64 absolute. slots: [n] int64, distinct but for padding at slot 0.
        weights: see `ContextWeights`. addresses: `weights.addresses` of the pools.
        heads, head_dim: Hkv and D of the pools on this rank.
    """
    n, width = features.shape
    hidden = len(weights.fc)
    context = torch.empty(n, hidden, dtype=torch.float32, device=features.device)
    block_m = min(max(triton.next_power_of_2(n), 16), 64)
    row_blocks = triton.cdiv(n, block_m)
    wide = features.dtype == torch.float32
    interpreted = features.device.type == "cpu"
    block = BLOCK_K // 2 if wide else BLOCK_K
    _project[(row_blocks, triton.cdiv(hidden, PROJECTION_COLUMNS))](
        features,
        weights.fc,
        context,
        n,
        hidden,
        width,
        WIDEN=interpreted,
        BLOCK_M=block_m,
        BLOCK_N=PROJECTION_COLUMNS,
        BLOCK=block,
        num_warps=4,
        num_stages=4,
    )
    _write_kv[(row_blocks, len(addresses) * 2 * heads)](
        context,
        weights.norm,
        addresses,
        weights.cos_sin,
        positions.contiguous(),
        slots.contiguous(),
        n,
        hidden,
        weights.context_eps,
        weights.head_eps,
        HEADS=heads,
        HALF=head_dim // 2,
        TYPE=FLOATS[features.dtype],
        WIDEN=interpreted,
        BLOCK_M=block_m,
        BLOCK=write_block(block, block_m, head_dim),
        num_warps=8 if block_m == 64 else 4,
        num_stages=3,
    )
