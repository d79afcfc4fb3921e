"""The specialisations of context KV that servers run, for `tools.compile_kernels`."""

from __future__ import annotations

import triton.language as tl

from sglang_jetspec.kernels.ahead_of_time import Variant
from sglang_jetspec.kernels.draft_kv.kernel import (
    BLOCK_K,
    PROJECTION_COLUMNS,
    _project,
    _write_kv,
    write_block,
)


def _projection(rows: int) -> Variant:
    pointers = {"features": "*bf16", "weight": "*bf16", "out": "*fp32"}
    tile = {"BLOCK_M": rows, "BLOCK_N": PROJECTION_COLUMNS, "BLOCK": BLOCK_K}
    return Variant(
        name=f"draft_kv project bf16, {rows} rows",
        kernel=_project,
        signature=pointers | dict.fromkeys("nHK", "i32"),
        constants={"WIDEN": False, **tile},
        divisible=(*pointers, "H", "K"),
        options={"num_warps": 4, "num_stages": 4},
    )


def _write(rows: int, head: int) -> Variant:
    pointers = dict.fromkeys(("addresses", "positions", "slots"), "*i64")
    pointers |= {"context": "*fp32", "norm": "*bf16", "cos_sin": "*fp32"}
    scalars = {"n": "i32", "H": "i32", "context_eps": "fp32", "head_eps": "fp32"}
    tile = {"BLOCK_M": rows, "BLOCK": write_block(BLOCK_K, rows, head)}
    return Variant(
        name=f"draft_kv write bf16, {rows} rows, head {head}",
        kernel=_write_kv,
        signature=pointers | scalars,
        constants={"HEADS": 8, "HALF": head // 2, "TYPE": tl.bfloat16, "WIDEN": False, **tile},
        divisible=(*pointers, "H"),
        options={"num_warps": 8 if rows == 64 else 4, "num_stages": 3},
    )


VARIANTS = (
    _projection(16),
    _projection(64),
    _write(16, 64),
    _write(16, 128),
    _write(64, 128),
    _write(16, 256),
)
