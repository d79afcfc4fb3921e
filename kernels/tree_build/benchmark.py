"""Time and check tree building: on a GPU the kernel, on a CPU the compiled builder.

    python -m sglang_jetspec.kernels.tree_build.benchmark

The last line is one JSON object.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch
import tyro
from torch import Tensor

from sglang_jetspec.kernels.timing import median_us, print_result
from sglang_jetspec.trees import DraftTree, best_first_tree
from sglang_jetspec.trees.best_first_cpu import best_first_tree_cpu
from sglang_jetspec.trees.heap import best_first_nodes


@dataclass(frozen=True)
class Shape:
    batch: int = 64
    nodes: int = 256
    width: int = 7
    depth: int = 16

    def drafts(self, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Roots, tokens and log-probabilities as peaked as a good head's."""
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(self.batch, self.depth, 1000, generator=generator)
        top = logits.log_softmax(-1).topk(self.width)
        roots = torch.zeros(self.batch, dtype=torch.int64)
        return roots.to(device), top.indices.to(device), top.values.to(device)


@dataclass(frozen=True)
class OnGpu:
    shape: Shape
    equal: bool  # to the torch program, bit for bit, in every field
    kernel_us: float
    torch_us: float


@dataclass(frozen=True)
class OnCpu:
    """Best times of several runs in CPU seconds of this process, whole trees and masks included."""

    shape: Shape
    heap_ms: float
    compiled_ms: float
    torch_ms: float
    speedup: float  # heap over compiled
    heap_score: float  # sum of all nodes' cumulative log-probabilities
    compiled_score: float
    equal: bool  # compiled to the torch program, bit for bit, in every field


def measure(shape: Shape, device: str) -> OnGpu:
    """Run the kernel and the torch program on `device`."""
    from sglang_jetspec.kernels.tree_build import kernel, naive

    drafts = shape.drafts(device)
    got, expected = (m.tree_build(*drafts, shape.nodes) for m in (kernel, naive))
    return OnGpu(
        shape,
        equal=all(
            torch.equal(getattr(got, f.name), getattr(expected, f.name)) for f in fields(got)
        ),
        kernel_us=median_us(lambda: kernel.tree_build(*drafts, shape.nodes), device),
        torch_us=median_us(lambda: best_first_tree(*drafts, shape.nodes), device),
    )


def measure_cpu(shape: Shape, runs: int) -> OnCpu:
    """Compare the compiled builder with the heap in plain Python."""
    drafts = shape.drafts("cpu")
    rows = drafts[2].tolist()

    def best_ms(call, runs: int) -> float:
        times = []
        for _ in range(runs):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
        return min(times) * 1e3

    heap = [best_first_nodes(one, shape.nodes) for one in rows]
    compiled = best_first_tree_cpu(*drafts, shape.nodes)
    program = best_first_tree(*drafts, shape.nodes)
    heap_ms = best_ms(lambda: [best_first_nodes(one, shape.nodes) for one in rows], runs)
    compiled_ms = best_ms(lambda: best_first_tree_cpu(*drafts, shape.nodes), 4 * runs)
    return OnCpu(
        shape,
        heap_ms=heap_ms,
        compiled_ms=compiled_ms,
        torch_ms=best_ms(lambda: best_first_tree(*drafts, shape.nodes), 2),
        speedup=heap_ms / compiled_ms,
        heap_score=sum(node.score for tree in heap for node in tree),
        compiled_score=float(compiled.logprobs[compiled.live].double().sum()),
        equal=all(
            torch.equal(getattr(compiled, f.name), getattr(program, f.name))
            for f in fields(DraftTree)
        ),
    )


def main(shape: Shape, runs: int = 5, device: str | None = None) -> None:
    """device: cuda or cpu; by default whichever is there. runs: repetitions on a CPU."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    print_result(measure_cpu(shape, runs) if device == "cpu" else measure(shape, device))


if __name__ == "__main__":
    tyro.cli(main)
