"""Target-shaped decoder layers in plain torch, over key-value caches indexed by position.

A cache row p holds the keys and values of position p, predicted or true: rows written for a block
under verification are simply overwritten when the true ones arrive, and a row sees the positions
up to its own. Parameter names are those of Hugging Face, so that a target's layers load as is.

Shapes: B sequences, R rows, C cache positions, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sglang_jetspec.heads.fields import HeadError
from sglang_jetspec.heads.reference import RMSNorm, rotary_table, rotate


class LayerShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a pre-norm decoder layer with grouped-query attention and a SiLU-gated MLP."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    qk_norm: bool
    attention_bias: bool = False

    @classmethod
    def of_target(cls, model: nn.Module) -> LayerShape:
        """The shape of a Hugging Face causal language model's layers.

        Raises HeadError for rotary scaling; other foreign parts show when weights are loaded.
        """
        config: Any = model.config
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise HeadError(
                f"the target's rope_type is {rope['rope_type']!r}; JetSpec++ serves targets with "
                "default rotary embeddings, serve this one with a plain JetSpec head"
            )
        attention: Any = model.get_submodule("model.layers.0.self_attn")
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            qk_norm=hasattr(attention, "q_norm"),
            attention_bias=attention.q_proj.bias is not None,
        )


@dataclass
class LayerCache:
    """Keys and values of L layers, by position."""

    keys: Tensor  # [L, B, kv heads, C, head_dim]
    values: Tensor  # [L, B, kv heads, C, head_dim]

    @classmethod
    def empty(
        cls, shape: LayerShape, layers: int, batch: int, positions: int, like: Tensor
    ) -> LayerCache:
        """Zeros for `layers` layers of `shape`, of `like`'s type and on its device."""
        size = (layers, batch, shape.num_key_value_heads, positions, shape.head_dim)
        return cls(like.new_zeros(size), like.new_zeros(size))

    @property
    def positions(self) -> int:
        """C, the positions it holds."""
        return self.keys.shape[3]

    def write(
        self, layer: int, positions: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store rows [B, kv heads, R, head_dim] at `positions` [B, R]; returns the whole layer."""
        index = positions[:, None, :, None].expand_as(keys)
        self.keys[layer].scatter_(2, index, keys)
        self.values[layer].scatter_(2, index, values)
        return self.keys[layer], self.values[layer]

    def repeat(self, times: int) -> LayerCache:
        """A copy with every sequence repeated `times` times in place."""
        return LayerCache(
            self.keys.repeat_interleave(times, dim=1), self.values.repeat_interleave(times, dim=1)
        )


class LayerAttention(nn.Module):
    """Attention of one layer; `cache` None attends over the rows themselves."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q = shape.num_attention_heads * shape.head_dim
        kv = shape.num_key_value_heads * shape.head_dim
        bias = shape.attention_bias
        self.q_proj = nn.Linear(shape.hidden_size, q, bias=bias)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=bias)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=bias)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm: nn.Module = RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.k_norm: nn.Module = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        else:
            self.q_norm = self.k_norm = nn.Identity()

    def forward(
        self,
        rows: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        positions: Tensor,
        cache: tuple[LayerCache, int] | None,
    ) -> Tensor:
        """rows [B,R,H], mask [B,R,keys] -> [B,R,H]; keys are the cache's positions or the rows."""
        q = rotate(self.q_norm(self._split(self.q_proj(rows))).transpose(1, 2), *rotary)
        k = rotate(self.k_norm(self._split(self.k_proj(rows))).transpose(1, 2), *rotary)
        v = self._split(self.v_proj(rows)).transpose(1, 2)
        if cache is not None:
            store, layer = cache
            k, v = store.write(layer, positions, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class LayerMLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """One pre-norm layer of the target's form."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = LayerAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = LayerMLP(shape)

    def forward(
        self,
        rows: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        positions: Tensor,
        cache: tuple[LayerCache, int] | None,
    ) -> Tensor:
        """rows [B,R,H] -> [B,R,H]."""
        normed = self.input_layernorm(rows)
        rows = rows + self.self_attn(normed, rotary, mask, positions, cache)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class LayerStack(nn.Module):
    """Consecutive layers; layer i uses entry `first_cache` + i of a LayerCache."""

    def __init__(self, shape: LayerShape, layers: int, first_cache: int = 0) -> None:
        super().__init__()
        self.shape, self.first_cache = shape, first_cache
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(layers))

    def forward(
        self,
        rows: Tensor,
        positions: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | None = None,
    ) -> list[Tensor]:
        """The rows' states after every layer, each [B,R,H].

        rows [B,R,H], positions [B,R] int64. With a cache, rows are stored at their positions and
        see all stored positions up to their own; without one, `mask` [B,R,R] says what they see.
        """
        if mask is None:
            assert cache is not None, "rows need a cache or a mask"
            stored = torch.arange(cache.positions, device=rows.device)
            mask = stored <= positions[:, :, None]
        rotary = rotary_table(positions, self.shape.head_dim, self.shape.rope_theta)
        states = []
        for index, layer in enumerate(self.layers):
            entry = None if cache is None else (cache, self.first_cache + index)
            rows = layer(rows, rotary, mask, positions, entry)
            states.append(rows)
        return states
