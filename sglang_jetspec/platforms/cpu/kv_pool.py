"""KV storage of the CPU platform: plain-torch moves and slot look-ups."""

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's pool without the Triton KV copy that any speculative algorithm switches on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_native_move_kv_cache = True

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None


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
