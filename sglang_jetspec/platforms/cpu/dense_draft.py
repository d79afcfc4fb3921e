"""A draft head's passes in a plain loop over packed weights, as ``dense_decoder`` runs a target.

Shapes: n rows, H hidden size, T captured target layers, L draft layers, Hkv heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_context import get_attn_backend

from sglang_jetspec.platforms.cpu.dense_decoder import (
    DenseLayer,
    Norm,
    is_plain_layer,
    is_plain_process,
)
from sglang_jetspec.platforms.cpu.fused_ops import cos_sin, rotate
from sglang_jetspec.platforms.cpu.linear import PackedWeight


class DenseDraft:
    """The passes of one loaded and packed head."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = [DenseLayer.of(layer) for layer in model.layers]
        self.attentions = [layer.self_attn for layer in model.layers]
        self.final_norm, self.context_norm = Norm(model.norm), Norm(model.hidden_norm)
        self.version = self.attentions[0].qkv_proj.quant_method.packed_weight.version
        self.fc = PackedWeight(self.version)
        self.context = PackedWeight(self.version)
        self.stacked_at = -1

    @staticmethod
    def of(model: Any) -> DenseDraft | None:
        """The plain loop for ``model``, or None where its layers are not of the plain shape."""
        if not is_plain_process() or model.fc.bias is not None:
            return None
        if not all(is_plain_layer(layer) for layer in model.layers):
            return None
        return DenseDraft(model)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        """x: [n, H] embeddings of the block's rows. Returns normalised hidden states [n, H]."""
        backend = get_attn_backend()
        rotary = cos_sin(self.attentions[0].rotary_emb, positions, x.dtype)
        write = KVWriteLoc(forward_batch.out_cache_loc)
        for layer in self.layers:
            x = layer.forward(x, rotary, backend, write)
        return self.final_norm(x)

    def write_context(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, pool: Any
    ) -> None:
        """KV of committed positions for all layers from one projection. features: [n, T * H]."""
        context = self.context_norm(self.fc.linear(features, self.model.fc.weight, None))
        if self.stacked_at != self.version.value:
            self._stack()
        heads, size = self.attentions[0].num_kv_heads, self.attentions[0].head_dim
        layers = len(self.layers)
        kv = self.context.linear(context, self.weight, None).view(-1, 2, layers, heads, size)
        keys = torch.rms_norm(kv[:, 0], (size,), None, self.layers[0].key_norm.eps)
        keys = (keys * self.key_norms).view(-1, layers * heads, size)
        keys = rotate(keys, *cos_sin(self.attentions[0].rotary_emb, positions, keys.dtype))
        keys = keys.view(-1, layers, heads, size)
        for index, attention in enumerate(self.attentions):
            pool.set_kv_buffer(
                attention.attn, KVWriteLoc(slots, physical=True), keys[:, index], kv[:, 1, index]
            )

    def _stack(self) -> None:
        """All layers' key rows, then all layers' value rows, as one weight."""
        parts: list[list[torch.Tensor]] = [[], []]
        for attention in self.attentions:
            rows = attention.qkv_proj.weight[attention.q_size :]
            for part, weight in zip(parts, rows.split(attention.kv_size), strict=True):
                part.append(weight)
        self.weight = torch.cat(parts[0] + parts[1])
        self.key_norms = torch.stack([attention.k_norm.weight for attention in self.attentions])
        self.key_norms = self.key_norms.unsqueeze(1)
        self.stacked_at = self.version.value
