"""The definition of `tree_attention`, row by row in double precision."""

from __future__ import annotations

import torch
from torch import Tensor


def sees(mask_words: Tensor, columns: int) -> Tensor:
    """[..., W] packed int32 words to [..., columns] bool."""
    bits = mask_words.unsqueeze(-1) >> torch.arange(32, device=mask_words.device)
    return (bits & 1).bool().flatten(-2)[..., :columns]


def tree_attention(
    queries: Tensor,
    local_keys: Tensor,
    local_values: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    slot_table: Tensor,
    table_rows: Tensor,
    prefix_lens: Tensor,
    mask_words: Tensor,
    *,
    scale: float,
    window: int | None = None,
    positions: Tensor | None = None,
    logit_cap: float = 0.0,
    page_size: int = 1,
) -> Tensor:
    """As the kernel's launcher. Returns [B, P, Hq, D] fp64."""
    batch, n_queries, heads, _ = queries.shape
    n_local, heads_kv = local_keys.shape[1:3]
    out = torch.empty(queries.shape, dtype=torch.float64, device=queries.device)
    for b in range(batch):
        length = int(prefix_lens[b])
        at = torch.arange(length, device=queries.device)
        pages = slot_table[int(table_rows[b])].long()
        slots = pages[at // page_size] * page_size + at % page_size
        keys, values = (
            torch.cat([pool[slots], local[b]]).double().repeat_interleave(heads // heads_kv, 1)
            for pool, local in ((key_pool, local_keys), (value_pool, local_values))
        )
        visible = torch.ones(n_queries, length + n_local, dtype=torch.bool, device=queries.device)
        visible[:, length:] = sees(mask_words[b], n_local)
        if window is not None and window >= 0:
            assert positions is not None
            where = torch.cat([at, positions[b]])
            visible &= where >= (positions[b, -n_queries:] - window).unsqueeze(1)
        scores = torch.einsum("phd,khd->hpk", queries[b].double(), keys) * scale
        if logit_cap:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
        out[b] = torch.einsum("hpk,khd->phd", weights.nan_to_num(0.0), values)
    return out
