"""Time and check the commit on this machine's GPU.

    python -m sglang_jetspec.kernels.commit.benchmark

The last line is one JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro

from sglang_jetspec.kernels.commit import kernel, naive
from sglang_jetspec.kernels.timing import median_us, print_result


@dataclass(frozen=True)
class Shape:
    """Defaults: Qwen3-8B with five tapped layers; every path is `accepted` nodes long."""

    batch: int = 8
    nodes: int = 64
    steps: int = 16
    accepted: int = 7
    layers: int = 36
    heads: int = 8
    head: int = 128
    features: int = 5 * 4096

    def moved_bytes(self) -> int:
        """Read and written: KV of all accepted nodes but the roots, features of all steps."""
        kv = (self.accepted - 1) * 2 * self.layers * self.heads * self.head
        return 2 * 2 * self.batch * (kv + self.steps * self.features)


@dataclass(frozen=True)
class Result:
    shape: Shape
    equal: bool
    kernel_us: float
    torch_us: float
    gigabytes_s: float


def measure(shape: Shape, device: str) -> Result:
    """Random paths in random slots, in bf16."""
    generator = torch.Generator().manual_seed(0)
    count = shape.batch * shape.nodes
    window = (torch.randperm(count, generator=generator) + 1).view(shape.batch, -1).to(device)
    path = torch.full((shape.batch, shape.steps), -1)
    path[:, 0] = 0
    for row in path:
        later = torch.randperm(shape.nodes - 1, generator=generator)[: shape.accepted - 1] + 1
        row[1 : shape.accepted] = later.sort().values
    path = path.to(device)
    size = (2 * shape.layers, count + 1, shape.heads, shape.head)
    buffers = torch.randn(size, device=device, dtype=torch.bfloat16)
    features = torch.randn(count, shape.features, device=device, dtype=torch.bfloat16)
    lengths = torch.full((shape.batch,), 4096, device=device)
    moved = buffers.clone()
    expected = naive.commit(path, window, lengths, 40960, list(moved), features)
    table = kernel.buffer_table(list(buffers))
    row_bytes = shape.heads * shape.head * 2

    def run() -> kernel.Committed:
        return kernel.commit(path, window, lengths, 40960, table, row_bytes, features)

    got = run()
    equal = torch.equal(buffers, moved) and torch.equal(got.features, expected.features)
    equal &= torch.equal(got.slots, expected.slots)
    equal &= torch.equal(got.positions, expected.positions)
    kernel_us = median_us(run, device)
    # Of fixed shape, as a round without host reads has it: padding moves slot 0 onto itself.
    kept, nodes = path >= 0, path.clamp(min=0)
    source, target = window.gather(1, nodes) * kept, window[:, : shape.steps] * kept
    rows = (nodes + torch.arange(shape.batch, device=device).unsqueeze(1) * shape.nodes).flatten()

    def in_torch() -> torch.Tensor:
        for buffer in moved:
            buffer[target] = buffer[source]
        return features[rows]

    return Result(
        shape,
        equal,
        kernel_us,
        torch_us=median_us(in_torch, device),
        gigabytes_s=shape.moved_bytes() / kernel_us / 1e3,
    )


def main(shape: Shape, device: str = "cuda") -> None:
    print_result(measure(shape, device))


if __name__ == "__main__":
    tyro.cli(main)
