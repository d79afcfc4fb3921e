"""Keys of committed positions where a server keeps them: pools of slots, found by request.

Shapes: B requests, C positions, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_jetspec.foresight.layers import LayerShape, RowKeys

Buffers = Sequence[tuple[Tensor, Tensor]]  # by layer, keys and values [S, kv heads, head_dim]


@dataclass
class PagedKeys:
    """Keys of positions 0..C-1 of B requests, gathered once a layer.

    buffers: the pool's layers. slots: [B, C] int64.
    """

    buffers: Buffers
    slots: Tensor
    gathered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv heads, C, head_dim] of a layer."""
        if index not in self.gathered:
            keys, values = self.buffers[index]
            self.gathered[index] = (
                keys[self.slots].transpose(1, 2),
                values[self.slots].transpose(1, 2),
            )
        return self.gathered[index]


class KeyPool:
    """Keys and values by slot, for an adapter, whose slots are the target's."""

    def __init__(self, shape: LayerShape, layers: int, slots: int, like: Tensor) -> None:
        size = (layers, slots, shape.num_key_value_heads, shape.head_dim)
        self.keys, self.values = like.new_zeros(size), like.new_zeros(size)

    @property
    def buffers(self) -> Buffers:
        return list(zip(self.keys, self.values, strict=True))

    def write(self, slots: Tensor, rows: RowKeys) -> None:
        """Store the rows' keys at `slots` [B, R]."""
        spots = slots.flatten()
        for index, (keys, values) in enumerate(rows.layers):
            self.keys[index].index_copy_(0, spots, keys.transpose(1, 2).flatten(0, 1))
            self.values[index].index_copy_(0, spots, values.transpose(1, 2).flatten(0, 1))


def check_buffers(name: str, buffers: Buffers, dtype: torch.dtype) -> None:
    """ValueError where a pool does not keep plain [S, kv heads, head_dim] rows of `dtype`."""
    for keys, values in buffers:
        if keys.dim() != 3 or values.dim() != 3 or keys.dtype != dtype:
            raise ValueError(
                f"the {name}'s KV pool keeps {keys.dtype} {list(keys.shape)}, JetSpec++ reads "
                f"{dtype} [slots, heads, size]; serve without --kv-cache-dtype"
            )
