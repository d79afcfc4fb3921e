"""The specialisation of the commit that servers run, for `tools.compile_kernels`."""

from __future__ import annotations

import triton.language as tl

from sglang_jetspec.kernels.ahead_of_time import Variant
from sglang_jetspec.kernels.commit.kernel import _commit

_LONGS = ("path", "window", "prefix_lens", "buffers", "features", "features_out")
_POINTERS = dict.fromkeys((*_LONGS, "positions_out", "slots_out"), "*i64")
_COUNTS = ("N", "STEPS", "context_len", "kv_words", "kv_spans", "moved_spans", "feature_words")

VARIANTS = (
    Variant(
        name="commit 16 steps, 8-byte words",
        kernel=_commit,
        signature=_POINTERS | dict.fromkeys(_COUNTS, "i32"),
        constants={"WORD": tl.int64, "BLOCK_S": 16, "SPAN": 256},
        divisible=(*_POINTERS, "N", "kv_words", "feature_words"),
        options={"num_warps": 4},
    ),
)
