"""The specialisation of acceptance that servers run, for `tools.compile_kernels`."""

from __future__ import annotations

from sglang_jetspec.kernels.ahead_of_time import Variant
from sglang_jetspec.kernels.tree_accept.kernel import _tree_accept

_LONGS = ("tokens", "parents", "choices", "path_out", "tokens_out", "lengths_out")
_POINTERS = dict.fromkeys(_LONGS, "*i64") | {"live": "*i8"}

VARIANTS = tuple(
    Variant(
        name=f"tree_accept {nodes} nodes",
        kernel=_tree_accept,
        signature=_POINTERS | {"N": "i32", "STEPS": "i32"},
        constants={"BLOCK_N": nodes, "BLOCK_S": 16},
        divisible=(*_POINTERS, "N"),
        options={"num_warps": 1},
    )
    for nodes in (64, 256)
)
