"""Time and check the head's context KV on this machine's GPU.

    python -m sglang_jetspec.kernels.draft_kv.benchmark --shape.rows 16

The last line is one JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import tyro

from sglang_jetspec.heads.reference import rotary_table
from sglang_jetspec.kernels.draft_kv import kernel, naive
from sglang_jetspec.kernels.timing import median_us, print_result


@dataclass(frozen=True)
class Shape:
    """Defaults: the published head of Qwen3-8B, one request's round."""

    rows: int = 16
    hidden: int = 4096
    taps: int = 5
    layers: int = 5
    heads: int = 8
    head: int = 128

    def weight_bytes(self) -> int:
        """Of bf16 weights, each read once."""
        kv = 2 * self.layers * self.heads * self.head
        return 2 * self.hidden * (self.taps * self.hidden + kv)


@dataclass(frozen=True)
class Result:
    shape: Shape
    error: float  # largest difference to float64 over the largest value
    kernel_us: float
    torch_us: float
    gigabytes_s: float


def random_weights(shape: Shape, device: str) -> kernel.ContextWeights:
    """Weights that keep the scale of what passes through them, in bf16."""

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(size, device=device) * size[-1] ** -0.5).bfloat16()

    kv = shape.heads * shape.head
    cos, sin = rotary_table(torch.arange(8192, device=device).unsqueeze(0), shape.head, 1e6)
    half = shape.head // 2
    ones = torch.ones(shape.head, device=device, dtype=torch.bfloat16)
    return kernel.ContextWeights(
        fc=normal(shape.hidden, shape.taps * shape.hidden),
        norm=torch.ones(shape.hidden, device=device, dtype=torch.bfloat16),
        keys=[normal(kv, shape.hidden) for _ in range(shape.layers)],
        values=[normal(kv, shape.hidden) for _ in range(shape.layers)],
        key_norms=[ones for _ in range(shape.layers)],
        cos_sin=torch.cat([cos[0, :, :half], sin[0, :, :half]], -1),
        context_eps=1e-6,
        head_eps=1e-6,
    )


def measure(shape: Shape, device: str) -> Result:
    """Random weights and features in bf16."""
    torch.manual_seed(0)
    weights = random_weights(shape, device)
    features = torch.randn(shape.rows, shape.taps * shape.hidden, device=device).bfloat16()
    positions = torch.arange(4096, 4096 + shape.rows, device=device)
    slots = torch.randperm(shape.rows, device=device) + 1
    size = (2, shape.layers, shape.rows + 1, shape.heads, shape.head)
    pools = torch.zeros(size, device=device, dtype=torch.bfloat16)
    exact = torch.zeros(size, device=device, dtype=torch.float64)
    naive.draft_kv(features, positions, slots, weights, exact[0], exact[1])
    addresses = weights.addresses(pools[0], pools[1])

    def run() -> None:
        kernel.draft_kv(features, positions, slots, weights, addresses, shape.heads, shape.head)

    run()
    error = float((pools.double() - exact).abs().max() / exact.abs().max())
    cos, sin = weights.cos_sin[positions].unsqueeze(1).chunk(2, -1)

    def in_torch() -> None:
        """One matrix product a weight, as SGLang's layers do it."""
        context = F.rms_norm(F.linear(features, weights.fc), (shape.hidden,), weights.norm, 1e-6)
        for layer in range(shape.layers):
            key = F.linear(context, weights.keys[layer]).view(-1, shape.heads, shape.head)
            key = F.rms_norm(key, (shape.head,), weights.key_norms[layer], 1e-6).float()
            first, second = key.chunk(2, -1)
            turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
            pools[0, layer][slots] = turned.bfloat16()
            value = F.linear(context, weights.values[layer])
            pools[1, layer][slots] = value.view(-1, shape.heads, shape.head)

    kernel_us = median_us(run, device)
    return Result(
        shape,
        error,
        kernel_us,
        torch_us=median_us(in_torch, device),
        gigabytes_s=shape.weight_bytes() / kernel_us / 1e3,
    )


def main(shape: Shape, device: str = "cuda") -> None:
    print_result(measure(shape, device))


if __name__ == "__main__":
    tyro.cli(main)
