"""The specialisations of tree attention that servers run, for `tools.compile_kernels`."""

from __future__ import annotations

from typing import Any

import torch

from sglang_jetspec.kernels.ahead_of_time import Variant
from sglang_jetspec.kernels.tree_attention.kernel import (
    REDUCE_ROWS,
    attend,
    choose_tile,
    choose_warps,
    reduce,
)

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _attend(kind: str, head: int, rows: int, **features: bool) -> Variant:
    """rows: P * G of a KV head."""
    flags = {"WINDOWED": False, "CAPPED": False, "SPLIT": True} | features
    block_m, block_n = choose_tile(TYPES[kind], head, rows)
    data = f"*{kind}"
    pointers = dict.fromkeys(("q_ptr", "local_k_ptr", "local_v_ptr"), data)
    pointers |= dict.fromkeys(("pool_k_ptr", "pool_v_ptr", "out_ptr"), data)
    pointers |= {"table_ptr": "*i32", "rows_ptr": "*i64", "lens_ptr": "*i64", "mask_ptr": "*i32"}
    pointers |= {"positions_ptr": "*i64", "partial_ptr": "*fp32", "lse_ptr": "*fp32"}
    strides = ("q_batch", "q_row", "local_k_batch", "local_k_row", "local_v_batch")
    strides += ("local_v_row", "pool_k_slot", "pool_v_slot", "table_row")
    counts = ("n_queries", "n_local", "n_words", "n_heads_kv", "window")
    constants: dict[str, Any] = {"GROUP": 4, "HEAD": head, "PAGE": 1, "WIDEN": False}
    label = "".join(f" {name.lower()}" for name, on in features.items() if on)
    return Variant(
        name=f"attend {kind} head {head} tile {block_m}x{block_n}{label}",
        kernel=attend,
        signature=pointers
        | dict.fromkeys(strides + counts, "i32")
        | {"scale": "fp32", "cap": "fp32"},
        constants=constants | flags | {"BLOCK_M": block_m, "BLOCK_N": block_n},
        divisible=(*pointers, *strides[:-1]),
        options={"num_warps": choose_warps(TYPES[kind], block_m), "num_stages": 2},
    )


def _reduce(head: int) -> Variant:
    pointers = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "out_ptr": "*bf16"}
    return Variant(
        name=f"reduce head {head}",
        kernel=reduce,
        signature=pointers | {"n_rows": "i32", "splits": "i32"},
        constants={"HEAD": head, "BLOCK_R": REDUCE_ROWS},
        divisible=tuple(pointers),
    )


VARIANTS = (
    _attend("bf16", 64, 256),
    _attend("bf16", 128, 64),
    _attend("bf16", 128, 256),
    _attend("bf16", 128, 256, WINDOWED=True),
    _attend("bf16", 256, 256),
    _attend("fp16", 128, 256),
    _attend("fp32", 128, 256),
    _attend("bf16", 256, 256, WINDOWED=True, CAPPED=True),
    _reduce(128),
)
