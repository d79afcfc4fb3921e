"""Attention over gathered KV rows, in plain torch.

Shapes: B requests, n rows per request, L keys, Hq and Hkv heads, G = Hq / Hkv, D head size.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_jetspec.platforms.cpu.attention_plan import (
    DecodePlan,
    ExtendPlan,
    ExtendSegment,
    PaddedGroup,
    VerifyPlan,
)

# Query rows of a prefill attended at once when a mask is needed: bounds the mask's memory.
EXTEND_ROWS = 512


class LayerSpec(NamedTuple):
    """What a layer asks of its attention. window < 0: none; logit_cap 0: none."""

    scale: float
    causal: bool
    window: int
    logit_cap: float


def attend(
    plan: DecodePlan | VerifyPlan | ExtendPlan,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: LayerSpec,
) -> torch.Tensor:
    """Attention of every row of the batch.

    queries: [tokens, Hq, D]; keys: [slots, Hkv, D] and values: [slots, Hkv, Dv], the layer's
    whole KV buffer. Returns [tokens, Hq, Dv] in the queries' dtype.
    """
    if isinstance(plan, ExtendPlan):
        output = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for segment in plan.segments:
            rows = slice(segment.start, segment.start + segment.length)
            output[rows] = _extend(segment, queries[rows], keys, values, spec)
        return output
    n = plan.rows_per_request if isinstance(plan, VerifyPlan) else 1
    batched = queries.view(-1, n, *queries.shape[1:])
    if plan.groups[0].rows is None:
        return _padded(plan.groups[0], batched, keys, values, spec).flatten(0, 1)
    output = queries.new_empty(*batched.shape[:3], values.shape[-1])
    for group in plan.groups:
        output[group.rows] = _padded(group, batched[group.rows], keys, values, spec)
    return output.flatten(0, 1)


def _padded(
    group: PaddedGroup,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: LayerSpec,
) -> torch.Tensor:
    """queries: [b, n, Hq, D]. Returns [b, n, Hq, Dv].

    The G query heads that share a KV head become rows of that head, so K and V are not repeated.
    """
    batch, n, heads, _ = queries.shape
    kv_heads = keys.shape[1]
    folded = queries.unflatten(2, (kv_heads, -1))
    folded = folded.squeeze(1) if n == 1 else folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
    output = _sdpa(
        folded,
        group.slots.read(keys, queries.dtype),
        group.slots.read(values, queries.dtype),
        _bias(group, heads // kv_heads, spec, queries.dtype),
        spec,
    )
    if n > 1:
        output = output.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)
    return output.reshape(batch, n, heads, values.shape[-1])


def _extend(
    segment: ExtendSegment,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    spec: LayerSpec,
) -> torch.Tensor:
    """queries: [length, Hq, D]. Returns [length, Hq, Dv]."""
    group = queries.shape[1] // keys.shape[1]
    k = segment.slots.read(keys, queries.dtype).repeat_interleave(group, dim=1)
    v = segment.slots.read(values, queries.dtype).repeat_interleave(group, dim=1)
    q = queries.transpose(0, 1).unsqueeze(0)
    plain = spec.window < 0 and not spec.logit_cap
    if plain and (segment.prefix == 0 or not spec.causal):
        output = scaled_dot_product_attention(q, k, v, scale=spec.scale, is_causal=spec.causal)
        return output[0].transpose(0, 1)
    parts = []
    key_positions = torch.arange(k.shape[2])
    for start in range(0, segment.length, EXTEND_ROWS):
        rows = q[:, :, start : start + EXTEND_ROWS]
        end = segment.prefix + start + rows.shape[2]
        visible_keys = key_positions[:end] if spec.causal else key_positions
        positions = torch.arange(segment.prefix + start, end).unsqueeze(1)
        visible = visible_keys <= positions if spec.causal else visible_keys >= 0
        if spec.window >= 0:
            visible = visible & (visible_keys >= positions - spec.window)
        bias = _additive(visible, q.dtype)
        end = visible_keys.shape[0]
        parts.append(_sdpa(rows, k[:, :, :end], v[:, :, :end], bias, spec))
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _bias(
    group: PaddedGroup, repeat: int, spec: LayerSpec, dtype: torch.dtype
) -> torch.Tensor | None:
    """Additive mask [b, 1, G*n, L], or None when every key is visible; kept for later layers."""
    key = (repeat, spec.causal, spec.window, dtype)
    if key not in group.bias:
        visible = group.visible if spec.causal else group.bidirectional
        if spec.window >= 0:
            near = group.key_positions.unsqueeze(1) >= group.query_positions.unsqueeze(2) - (
                spec.window
            )
            visible = near if visible is None else visible & near
        bias = None if visible is None else _additive(visible, dtype)
        group.bias[key] = None if bias is None else bias.repeat(1, repeat, 1).unsqueeze(1)
    return group.bias[key]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, spec: LayerSpec
) -> torch.Tensor:
    """q: [b, H, R, D]; k, v: [b, H, L, D]; bias broadcasts to [b, H, R, L]. Returns [b, H, R, D].

    A logit cap (cap * tanh(scores / cap), before the mask) has no fused kernel.
    """
    if not spec.logit_cap:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=spec.scale)
    scores = torch.matmul(q.float() * spec.scale, k.float().transpose(2, 3))
    scores = spec.logit_cap * torch.tanh(scores / spec.logit_cap)
    if bias is not None:
        scores = scores + bias
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
