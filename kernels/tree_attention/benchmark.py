"""Time tree attention on this machine's GPU, beside FlashInfer's masked prefill where it is there.

    python -m sglang_jetspec.kernels.tree_attention.benchmark --nodes 16 64 128

Default shapes are Qwen3-8B's. The last line is one JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import tyro

from sglang_jetspec.kernels.timing import copy_bandwidth, median_us
from sglang_jetspec.kernels.tree_attention.kernel import tree_attention
from sglang_jetspec.trees.bitmask import block_words


@dataclass(frozen=True)
class Shape:
    batch: int
    nodes: int
    length: int
    heads: int
    kv_heads: int
    head: int

    def read_bytes(self, item: int) -> int:
        """Keys and values of prefixes and trees, once."""
        return 2 * self.batch * (self.length + self.nodes) * self.kv_heads * self.head * item

    def flops(self) -> int:
        """Two products of N x (L + N) x D a head."""
        return 4 * self.batch * self.nodes * (self.length + self.nodes) * self.heads * self.head


@dataclass(frozen=True)
class Result:
    shape: Shape
    ours_us: float
    flashinfer_us: float | None
    gigabytes_s: float
    teraflops: float
    of_copy_bandwidth: float


def tensors(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The kernel's arguments; slots in random order, as a busy server has them."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=dtype)

    slots = shape.batch * shape.length + 1
    pools = [normal(slots, shape.kv_heads, shape.head) for _ in range(2)]
    local = [normal(shape.batch, shape.nodes, shape.kv_heads, shape.head) for _ in range(2)]
    table = (torch.randperm(slots - 1, device="cuda") + 1).int().view(shape.batch, shape.length)
    return (
        normal(shape.batch, shape.nodes, shape.heads, shape.head),
        *local,
        *pools,
        table,
        torch.arange(shape.batch, device="cuda"),
        torch.full((shape.batch,), shape.length, device="cuda"),
        block_words(shape.nodes, True, "cuda").repeat(shape.batch, 1, 1),
    )


def flashinfer_run(shape: Shape, arguments: tuple[torch.Tensor, ...]) -> Callable[[], Any] | None:
    """FlashInfer's paged prefill with the same mask, planned; None where it is not installed."""
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper
    except ImportError:
        return None
    queries, _, _, *pools = arguments[:5]
    batch, nodes, width = shape.batch, shape.nodes, shape.length + shape.nodes
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    # The tree's slots are the last ones of the prefix: where they lie makes no difference in time.
    slots = torch.cat([arguments[5], arguments[5][:, :nodes]], 1).flatten()
    mask = torch.ones(batch, nodes, width, dtype=torch.bool, device="cuda")
    mask[:, :, shape.length :] = mask[:, :, shape.length :].tril()
    wrapper.plan(
        torch.arange(batch + 1, device="cuda", dtype=torch.int32) * nodes,
        torch.arange(batch + 1, device="cuda", dtype=torch.int32) * width,
        slots,
        torch.ones(batch, device="cuda", dtype=torch.int32),
        shape.heads,
        shape.kv_heads,
        shape.head,
        1,
        custom_mask=mask.flatten(),
        q_data_type=queries.dtype,
        kv_data_type=queries.dtype,
    )
    paged = tuple(pool.unsqueeze(1) for pool in pools)
    return lambda: wrapper.run(queries.flatten(0, 1), paged)


def measure(shape: Shape, dtype: torch.dtype, bandwidth: float) -> Result:
    """Median times; SGLang runs the kernel in a graph, so launch overhead is left out."""
    arguments = tensors(shape, dtype)
    scale = shape.head**-0.5
    ours = median_us(lambda: tree_attention(*arguments, scale=scale), "cuda")
    other = flashinfer_run(shape, arguments)
    rate = shape.read_bytes(dtype.itemsize) / ours * 1e6
    return Result(
        shape,
        ours_us=ours,
        flashinfer_us=None if other is None else median_us(other, "cuda"),
        gigabytes_s=rate / 1e9,
        teraflops=shape.flops() / ours / 1e6,
        of_copy_bandwidth=rate / bandwidth,
    )


def main(
    batches: tuple[int, ...] = (1, 8),
    nodes: tuple[int, ...] = (16, 64, 128),
    lengths: tuple[int, ...] = (4096,),
    heads: int = 32,
    kv_heads: int = 8,
    head: int = 128,
) -> None:
    """Time every combination in bf16."""
    from rich.console import Console
    from rich.table import Table

    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    bandwidth = copy_bandwidth("cuda")
    shapes = [
        Shape(batch, count, length, heads, kv_heads, head)
        for batch in batches
        for count in nodes
        for length in lengths
    ]
    results = [measure(shape, torch.bfloat16, bandwidth) for shape in shapes]
    table = Table("batch", "nodes", "prefix", "us", "FlashInfer us", "GB/s", "TFLOP/s", "of copy")
    for one in results:
        table.add_row(
            *map(str, (one.shape.batch, one.shape.nodes, one.shape.length)),
            f"{one.ours_us:.1f}",
            "-" if one.flashinfer_us is None else f"{one.flashinfer_us:.1f}",
            f"{one.gigabytes_s:.0f}",
            f"{one.teraflops:.0f}",
            f"{one.of_copy_bandwidth:.0%}",
        )
    console = Console()
    console.print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e9:.0f} GB/s")
    console.print(table)
    print(json.dumps([asdict(one) for one in results]))


if __name__ == "__main__":
    tyro.cli(main)
