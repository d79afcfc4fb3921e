"""The head's context KV through one fused kernel, where its layers have the plain shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sglang_jetspec.kernels.draft_kv.kernel import MAX_ROWS, ContextWeights, draft_kv, serves
from sglang_jetspec.steps import uniform_row_bytes


class ContextKernel:
    """`draft_kv` over the weights of a loaded head, where SGLang keeps them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.attentions = [layer.self_attn for layer in model.layers]
        self._pool: Any = None
        self._weights: ContextWeights | None = None  # None: the pool is not of the kernel's kind
        self._addresses: Tensor | None = None

    @staticmethod
    def of(model: Any) -> ContextKernel | None:
        """The kernel for ``model``, or None where only SGLang's modules compute its KV."""
        attentions = [layer.self_attn for layer in model.layers]
        plain = isinstance(model.fc, nn.Linear) and model.fc.bias is None
        plain &= not getattr(model.config, "use_gemma_norm", False)
        return ContextKernel(model) if plain and all(map(_is_plain, attentions)) else None

    def takes(self, features: Tensor, pool: Any) -> bool:
        """Whether this write is of the kernel's kind; prefills are left to matrix products."""
        if self._pool is not pool:
            self._bind(pool)
        return (
            self._weights is not None and features.dtype == pool.dtype and len(features) <= MAX_ROWS
        )

    def write(self, features: Tensor, positions: Tensor, slots: Tensor, pool: Any) -> None:
        """features: [n, T * H]. positions, slots: [n]. pool: the one that `takes` has just seen."""
        assert self._pool is pool
        assert self._weights is not None
        assert self._addresses is not None
        first = self.attentions[0]
        draft_kv(
            features.contiguous(),
            positions,
            slots,
            self._weights,
            self._addresses,
            first.num_kv_heads,
            first.head_dim,
        )

    def _bind(self, pool: Any) -> None:
        self._pool, self._weights, self._addresses = pool, None, None
        if pool.dtype == self.model.fc.weight.dtype and uniform_row_bytes(pool) is not None:
            self._weights = self._read_weights()
            self._addresses = self._weights.addresses(pool.k_buffer, pool.v_buffer)

    def _read_weights(self) -> ContextWeights:
        """Views of the loaded weights, which SGLang updates in place."""
        keys, values = [], []
        for attention in self.attentions:
            rows = attention.qkv_proj.weight[attention.q_size :]
            key, value = rows.split(attention.kv_size)
            keys.append(key)
            values.append(value)
        first = self.attentions[0]
        return ContextWeights(
            fc=self.model.fc.weight,
            norm=self.model.hidden_norm.weight,
            keys=keys,
            values=values,
            key_norms=[attention.k_norm.weight for attention in self.attentions],
            cos_sin=first.rotary_emb.cos_sin_cache,
            context_eps=self.model.hidden_norm.variance_epsilon,
            head_eps=first.k_norm.variance_epsilon,
        )


def _is_plain(attention: Any) -> bool:
    """Unquantised projections without bias, RMSNorm heads, rotation of the whole head in halves."""
    rotary, weight = attention.rotary_emb, getattr(attention.qkv_proj, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and attention.qkv_proj.bias is None
        and serves(attention.head_dim, weight.dtype)
        and attention.k_norm.weight.dtype is weight.dtype
        and attention.v_scale is None
        and not attention.use_gemma_norm
        and getattr(rotary, "is_neox_style", False)
        and getattr(rotary, "rotary_dim", None) == attention.head_dim
        and getattr(rotary, "cos_sin_cache", None) is not None
    )
