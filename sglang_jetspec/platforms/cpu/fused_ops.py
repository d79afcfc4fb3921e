"""SGLang's small operators with fewer torch calls: at a few rows the calls are the cost."""

from typing import Any

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor import forward_context


def register_fused_ops(dispatch_key: str) -> None:
    """Serve RMSNorm, SiLU-and-multiply and rotary embeddings of every model on this platform."""
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, dispatch_key)
    BaseFusedOp.register_oot_forward(SiluAndMul, silu_and_mul, dispatch_key)
    for rotary in _with_subclasses(RotaryEmbedding):
        if rotary.forward_native is RotaryEmbedding.forward_native:
            BaseFusedOp.register_oot_forward(rotary, rotary_embedding, dispatch_key)


def rms_norm(
    self: RMSNorm,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x, residual: [..., hidden]. Normalises x, or x + residual and returns that sum as well.

    The sum is rounded to the activations' dtype before the norm, as transformers does.
    """
    if not is_plain_norm(self, x.dtype) or x.shape[-1] != self.hidden_size:
        return self.forward_native(x, residual, post_residual_addition)
    if residual is not None:
        x = x + residual
        if post_residual_addition is not None:
            x = x + post_residual_addition
    out = torch.rms_norm(x, (self.hidden_size,), self.weight, self.variance_epsilon)
    return out if residual is None else (out, x)


def silu_and_mul(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
    """x: [..., 2 * size], gate then up. Returns silu(gate) * up, [..., size]."""
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def rotary_embedding(
    self: RotaryEmbedding,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [tokens, Hq * D] and key [tokens, Hkv * D] by positions [tokens]."""
    if not is_plain_rotary(self) or offsets is not None or fused_set_kv_buffer_arg is not None:
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    cos, sin = cos_sin(self, positions, query.dtype)
    query_heads, key_heads = (x.view(len(cos), -1, self.head_size) for x in (query, key))
    return (
        rotate(query_heads, cos, sin).view(query.shape),
        rotate(key_heads, cos, sin).view(key.shape),
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, H, D]; cos, sin: [tokens, 1, D], sin negated in its first half."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, dims=-1), sin)


def cos_sin(
    rotary: RotaryEmbedding, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [tokens, 1, D] of the positions, looked up once per forward pass."""
    context = (
        forward_context.get_forward_context() if forward_context.has_forward_context() else None
    )
    memo = rotary.__dict__.get("_jetspec_memo")
    if memo is not None and memo[0] is context and memo[1] is positions and context is not None:
        return memo[2]
    rows = rotary.cos_sin_cache.index_select(0, positions.flatten()).to(dtype).unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    tables = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    rotary.__dict__["_jetspec_memo"] = (context, positions, tables)
    return tables


def is_plain_norm(norm: RMSNorm, dtype: torch.dtype) -> bool:
    """Whether the norm is x / rms(x) * weight with the weight in the activations' dtype."""
    return (
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and norm.override_orig_dtype is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.weight.dtype is dtype
    )


def is_plain_rotary(rotary: torch.nn.Module) -> bool:
    """Whether positions index one cos/sin table and heads are rotated whole, by halves."""
    return (
        getattr(type(rotary), "forward_native", None) is RotaryEmbedding.forward_native
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
    )


def _with_subclasses(cls: type) -> list[type]:
    return [cls, *(found for sub in cls.__subclasses__() for found in _with_subclasses(sub))]
