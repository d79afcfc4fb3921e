"""Time and check acceptance on this machine's GPU.

    python -m sglang_jetspec.kernels.tree_accept.benchmark

The last line is one JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro

from sglang_jetspec.kernels.timing import median_us, print_result
from sglang_jetspec.kernels.tree_accept import kernel, naive
from sglang_jetspec.kernels.tree_build.benchmark import Shape
from sglang_jetspec.kernels.tree_build.naive import tree_build


@dataclass(frozen=True)
class Result:
    shape: Shape
    equal: bool
    kernel_us: float
    torch_us: float
    mean_length: float


def measure(shape: Shape, device: str) -> Result:
    """Trees whose first child is the target's choice at four nodes of five."""
    tree = tree_build(*shape.drafts(device), shape.nodes)
    generator = torch.Generator().manual_seed(1)
    agrees = (torch.rand(tree.tokens.shape, generator=generator) < 0.8).to(device)
    first = tree.tokens.gather(1, tree.first_child.clamp(min=0))
    choices = torch.where(agrees & (tree.first_child >= 0), first, -7)

    def run(module):
        return module.tree_accept(tree, choices, shape.depth)

    got, expected = run(kernel), run(naive)
    return Result(
        shape,
        equal=all(torch.equal(a, b) for a, b in zip(*map(_values, (got, expected)), strict=True)),
        kernel_us=median_us(lambda: run(kernel), device),
        torch_us=median_us(lambda: run(naive), device),
        mean_length=float(expected.lengths.float().mean()),
    )


def _values(found):
    return found.path, found.lengths, found.tokens


def main(shape: Shape, device: str = "cuda") -> None:
    print_result(measure(shape, device))


if __name__ == "__main__":
    tyro.cli(main)
