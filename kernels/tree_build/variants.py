"""The specialisations of tree building that servers run, for `tools.compile_kernels`."""

from __future__ import annotations

from sglang_jetspec.kernels.ahead_of_time import Variant
from sglang_jetspec.kernels.tree_build.kernel import _tree_build, warps


def _build(nodes: int) -> Variant:
    longs = ("roots", "top_tokens", "node_limits", "tokens_out", "parents_out", "depths_out")
    pointers = dict.fromkeys((*longs, "child_out", "sibling_out"), "*i64")
    pointers |= {"top_logprobs": "*fp32", "logprobs_out": "*fp32", "words_out": "*i32"}
    pointers |= {"live_out": "*i8", "ancestors_out": "*i8"}
    limits = {"depth_limits": None, "HAS_DEPTH_LIMITS": False, "HAS_NODE_LIMITS": True}
    return Variant(
        name=f"tree_build {nodes} nodes, width 7",
        kernel=_tree_build,
        signature=pointers | dict.fromkeys("NDWG", "i32"),
        constants={"BLOCK_N": nodes, "BLOCK_W": 8, **limits},
        divisible=(*pointers, "N"),
        options={"num_warps": warps(nodes * 8)},
    )


VARIANTS = (_build(64), _build(256))
