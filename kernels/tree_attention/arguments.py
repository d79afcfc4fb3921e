"""What `tree_attention` serves: its arguments' shapes, types and layouts, checked by name.

Letters as in `kernel`. All functions raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_jetspec.trees.bitmask import mask_words

HEAD_SIZES = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_values(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    words: Tensor,
) -> None:
    """The tensors that enter the arithmetic, and the mask."""
    batch, n_queries, heads, head_size = queries.shape
    n_local, heads_kv = keys.shape[1:3]
    if head_size not in HEAD_SIZES or queries.dtype not in DTYPES:
        raise ValueError(
            f"head size {head_size} in {queries.dtype}: tree attention serves head sizes "
            f"{HEAD_SIZES} in {', '.join(map(str, DTYPES))}"
        )
    local = (batch, n_local, heads_kv, head_size)
    if heads % heads_kv or n_local < n_queries or keys.shape != local or values.shape != local:
        raise ValueError(
            f"queries {tuple(queries.shape)}, local keys {tuple(keys.shape)} and values "
            f"{tuple(values.shape)}: B and D must be the same, Hq a multiple of Hkv, and C at "
            "least P"
        )
    if key_pool.shape[1:] != (heads_kv, head_size) or value_pool.shape != key_pool.shape:
        raise ValueError(
            f"pools {tuple(key_pool.shape)}, {tuple(value_pool.shape)}: "
            f"both must be [slots, {heads_kv}, {head_size}]"
        )
    if words.shape != (batch, n_queries, mask_words(n_local)) or (
        words.dtype is not torch.int32 or not words.is_contiguous()
    ):
        raise ValueError(
            f"mask words {tuple(words.shape)} {words.dtype}: must be contiguous int32 "
            f"[{batch}, {n_queries}, {mask_words(n_local)}]"
        )
    for name, tensor in (
        ("queries", queries),
        ("local keys", keys),
        ("local values", values),
        ("key pool", key_pool),
        ("value pool", value_pool),
    ):
        if tensor.stride()[-2:] != (head_size, 1) or tensor.dtype is not queries.dtype:
            raise ValueError(
                f"{name}: type {tensor.dtype}, strides {tensor.stride()}: needs {queries.dtype} "
                "with contiguous heads and dimensions"
            )


def check_addresses(
    queries: Tensor,
    slot_table: Tensor,
    table_rows: Tensor,
    prefix_lens: Tensor,
    out: Tensor | None,
) -> None:
    """What tells where to read and write; the kernel takes it to be contiguous."""
    batch = len(queries)
    for name, vector in (("table_rows", table_rows), ("prefix_lens", prefix_lens)):
        if vector.shape != (batch,) or not vector.is_contiguous():
            raise ValueError(
                f"{name} {tuple(vector.shape)} with strides {vector.stride()}: must be contiguous "
                f"[{batch}]"
            )
    if slot_table.dim() != 2 or slot_table.stride(1) != 1:
        raise ValueError(
            f"slot table {tuple(slot_table.shape)} with strides {slot_table.stride()}: must be "
            "[R, X] with contiguous rows"
        )
    if out is not None and (
        out.shape != queries.shape or out.dtype is not queries.dtype or not out.is_contiguous()
    ):
        raise ValueError(
            f"out {tuple(out.shape)} {out.dtype}: must be contiguous {queries.dtype} "
            f"{tuple(queries.shape)}"
        )


def check_positions(positions: Tensor | None, keys: Tensor) -> None:
    """Of a sliding window."""
    if positions is None or positions.shape != keys.shape[:2] or not positions.is_contiguous():
        shape = None if positions is None else tuple(positions.shape)
        raise ValueError(
            f"positions {shape}: a sliding window needs those of the local rows, contiguous "
            f"{tuple(keys.shape[:2])}"
        )
