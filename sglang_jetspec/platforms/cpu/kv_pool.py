"""KV storage of the CPU platform: plain-torch moves and slot look-ups."""

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's pool without Triton, with all layers in one tensor so that a move is one copy."""

    kv_buffer: torch.Tensor | None = None  # [K and V, layers, slots, heads, head size]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_native_move_kv_cache = True
        self._plain = self.store_dtype is self.dtype and not self.is_quantized_kv_cache

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if args or kwargs or not self._plain or cache_k.dtype is not self.dtype:
            super().set_kv_buffer(layer, loc_info, cache_k, cache_v, *args, **kwargs)
            return
        slots, _, _ = unwrap_write_loc(loc_info)
        index = layer.layer_id - self.start_layer
        self.k_buffer[index].index_copy_(0, slots, cache_k)
        self.v_buffer[index].index_copy_(0, slots, cache_v)

    def _create_buffers_normal(self) -> None:
        k_shape, v_shape = self._kv_buffer_shapes()
        if k_shape != v_shape or self.kv_cache_layout != "nhd":
            super()._create_buffers_normal()
            return
        self.kv_buffer = torch.zeros(2, self.layer_num, *k_shape, dtype=self.store_dtype)
        self.k_buffer, self.v_buffer = (list(half) for half in self.kv_buffer)

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if self.kv_buffer is None or self.is_quantized_kv_cache:
            super()._move_kv_cache_impl(tgt_loc, src_loc)
            return
        rows = self.kv_buffer.index_select(2, src_loc.flatten())
        self.kv_buffer.index_copy_(2, tgt_loc.flatten(), rows)


def verify_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Slots of columns [start, start + n) of each request's row, for n = `draft_token_num`.

    req_pool_indices, start_offset, end_offset: [B] int; req_to_token: [rows, width] int32.
    Returns [B * n] int64. Columns past the row's width give slot 0, SGLang's padding slot.
    """
    columns = start_offset.view(-1, 1) + torch.arange(draft_token_num, device=device)
    inside = columns < req_to_token.shape[1]
    slots = req_to_token[req_pool_indices.view(-1, 1), columns.clamp(max=req_to_token.shape[1] - 1)]
    return torch.where(inside, slots, 0).to(torch.int64).view(-1)
