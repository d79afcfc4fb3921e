"""Target-shaped decoder layers in plain torch.

Rows attend to each other and to keys that others keep: committed positions, a block that is being
verified. Parameter names are those of Hugging Face, so that a target's layers load as is.

Shapes: B sequences, R rows, n keys, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
        """The shape of a Hugging Face causal language model's layers (see `of_config`)."""
        attention: Any = model.get_submodule("model.layers.0.self_attn")
        bias = attention.q_proj.bias is not None
        return cls.of_config(model.config, hasattr(attention, "q_norm"), bias)

    @classmethod
    def of_config(cls, config: Any, qk_norm: bool, attention_bias: bool) -> LayerShape:
        """The shape of the layers that a Hugging Face configuration describes.

        Raises HeadError for rotary scaling; other foreign parts show when weights are loaded.
        """
        rope = config.rope_parameters
        if rope.get("rope_type", "default") != "default":
            raise HeadError(
                f"the target's rope_type is {rope['rope_type']!r}; JetSpec++ serves targets with "
                "default rotary embeddings, serve this one with a plain JetSpec head"
            )
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=float(rope["rope_theta"]),
            qk_norm=qk_norm,
            attention_bias=attention_bias,
        )


class Keys(Protocol):
    """Keys and values by layer, rotated and normed as the layers make them."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv heads, n, head_dim] of a layer."""
        ...


@dataclass
class RowKeys:
    """Keys and values of the rows of one pass, in the order of its layers."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.layers[index]


@dataclass(frozen=True)
class LaterLayers:
    """The same keys, counted from layer `first`."""

    keys: Keys
    first: int

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys.layer(self.first + index)


@dataclass(frozen=True)
class Seen:
    """Keys besides the rows' own. visible: [B, R, n] bool, which of them a row attends to."""

    keys: Keys
    visible: Tensor


class KeyCache:
    """Keys and values of B sequences by position, for offline programs."""

    def __init__(self, shape: LayerShape, layers: int, batch: int, positions: int) -> None:
        size = (layers, batch, shape.num_key_value_heads, positions, shape.head_dim)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.keys[index], self.values[index]

    def write(self, positions: Tensor, rows: RowKeys) -> None:
        """Store the rows' keys at `positions` [B, R], over what was there."""
        for index, (keys, values) in enumerate(rows.layers):
            spot = positions[:, None, :, None].expand_as(keys)
            self.keys[index].scatter_(2, spot, keys)
            self.values[index].scatter_(2, spot, values)

    def before(self, starts: Tensor, rows: int) -> Seen:
        """What `rows` rows of each sequence see: the positions before `starts` [B]."""
        stored = torch.arange(self.keys.shape[3], device=starts.device)
        visible = (stored < starts[:, None])[:, None].expand(-1, rows, -1)
        return Seen(self, visible)


def causal_rows(rows: int) -> Tensor:
    """[1, R, R] bool: each row sees those up to itself."""
    return torch.ones(1, rows, rows, dtype=torch.bool).tril()


class LayerAttention(nn.Module):
    """Grouped-query attention of one layer."""

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

    def project(self, rows: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv heads, R, head_dim] of rows [B, R, H]."""
        keys = self.k_norm(self._split(self.k_proj(rows))).transpose(1, 2)
        values = self._split(self.v_proj(rows)).transpose(1, 2)
        return rotate(keys, *rotary), values

    def forward(
        self,
        rows: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        seen: Sequence[tuple[Tensor, Tensor]],
        recorded: RowKeys,
    ) -> Tensor:
        """rows [B, R, H] -> [B, R, H].

        seen: keys and values before the rows' own, in the order of mask [B, R, keys + R].
        recorded: takes the rows' own.
        """
        queries = rotate(self.q_norm(self._split(self.q_proj(rows))).transpose(1, 2), *rotary)
        own = self.project(rows, rotary)
        recorded.layers.append(own)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*seen, own, strict=True))
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask[:, None], enable_gqa=True
        )
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
        seen: Sequence[tuple[Tensor, Tensor]],
        recorded: RowKeys,
    ) -> Tensor:
        """rows [B, R, H] -> [B, R, H]; arguments as of `LayerAttention.forward`."""
        rows = rows + self.self_attn(self.input_layernorm(rows), rotary, mask, seen, recorded)
        out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return out


class LayerStack(nn.Module):
    """Consecutive layers, the first of which is layer `first` of the keys that its rows see."""

    def __init__(self, shape: LayerShape, layers: int, first: int = 0) -> None:
        super().__init__()
        self.shape, self.first = shape, first
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(layers))

    def forward(
        self,
        rows: Tensor,
        positions: Tensor,
        own: Tensor,
        seen: Sequence[Seen] = (),
        recorded: RowKeys | None = None,
    ) -> list[Tensor]:
        """The rows' states after every layer, each [B, R, H].

        rows [B, R, H]. positions [B, R] int64. own [B or 1, R, R] bool: which rows see which.
        seen: other keys. recorded: gets the rows' keys and values.
        """
        recorded = RowKeys() if recorded is None else recorded
        own = own.expand(len(rows), -1, -1)
        mask = torch.cat([*(part.visible for part in seen), own], dim=2)
        rotary = rotary_table(positions, self.shape.head_dim, self.shape.rope_theta)
        states = []
        for index, layer in enumerate(self.layers):
            keys = [part.keys.layer(self.first + index) for part in seen]
            rows = layer(rows, rotary, mask, keys, recorded)
            states.append(rows)
        return states
