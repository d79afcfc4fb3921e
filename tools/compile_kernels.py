"""Compiles every kernel for GPUs that need not be there, and reports registers and spills.

    python -m sglang_jetspec.tools.compile_kernels

Shapes are those of Qwen3-8B in bf16: 64 nodes, width 7, depth 15, 5 draft layers, 8 KV heads of
128. The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import tyro
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LONG, WORD, BF16, FP32, BYTE = "*i64", "*i32", "*bf16", "*fp32", "*i8"


@dataclass(frozen=True)
class Variant:
    """A kernel and the types of its runtime arguments, in order; constants by name.

    Integers marked `:16` are multiples of 16, for which Triton compiles a variant of its own.
    """

    name: str
    kernel: Any
    types: Sequence[str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3

    def source(self) -> ASTSource:
        names = self.kernel.arg_names
        runtime = [name for name in names if name not in self.constants]
        types = dict(zip(runtime, self.types, strict=True))
        # Allocations are aligned, as the launchers' tensors are.
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if kind.startswith("*") or kind.endswith(":16")
        }
        signature = {name: kind.removesuffix(":16") for name, kind in types.items()}
        signature |= dict.fromkeys(self.constants, "constexpr")
        ordered = {name: signature[name] for name in names}
        return ASTSource(self.kernel, ordered, dict(self.constants), aligned)


@dataclass(frozen=True)
class Report:
    kernel: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx_lines: int


def variants() -> list[Variant]:
    """One variant of every kernel, as a server launches it."""
    from triton.language import bfloat16, int64

    from sglang_jetspec.kernels.commit.kernel import _commit
    from sglang_jetspec.kernels.draft_kv.kernel import _project, _write_kv
    from sglang_jetspec.kernels.tree_accept.kernel import _tree_accept
    from sglang_jetspec.kernels.tree_build.kernel import _tree_build, warps

    def build(block_n: int) -> Variant:
        types = [LONG, LONG, FP32, LONG, LONG, LONG, LONG, LONG, FP32, BYTE, BYTE, WORD, LONG, LONG]
        limits = {"HAS_DEPTH_LIMITS": False, "HAS_NODE_LIMITS": True}
        constants = {"BLOCK_N": block_n, "BLOCK_W": 8, **limits, "depth_limits": None}
        types.pop(3)
        name = f"tree_build N={block_n}"
        return Variant(
            name, _tree_build, [*types, "i32:16", *["i32"] * 3], constants, warps(block_n * 8)
        )

    return [
        build(64),
        build(256),
        Variant(
            "tree_accept",
            _tree_accept,
            [LONG, LONG, BYTE, LONG, LONG, LONG, LONG, "i32", "i32"],
            {"BLOCK_N": 64, "BLOCK_S": 16},
            num_warps=1,
        ),
        Variant(
            "commit",
            _commit,
            [*[LONG] * 8, "i32:16", *["i32"] * 2, "i32:16", "i32", "i32", "i32:16"],
            {"WORD": int64, "BLOCK_S": 16, "SPAN": 256},
            num_warps=4,
        ),
        Variant(
            "draft_kv: project",
            _project,
            [BF16, BF16, FP32, "i32", "i32:16", "i32:16"],
            {"WIDEN": False, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK": 128},
            num_warps=4,
            num_stages=4,
        ),
        Variant(
            "draft_kv: write",
            _write_kv,
            [FP32, BF16, LONG, FP32, LONG, LONG, "i32", "i32:16", "fp32", "fp32"],
            {
                **{"HEADS": 8, "HALF": 64, "TYPE": bfloat16, "WIDEN": False},
                **{"BLOCK_M": 16, "BLOCK": 128},
            },
            num_warps=4,
        ),
    ]


def compile_for(variant: Variant, arch: int) -> Report:
    """Compiles down to machine code. arch: 80, 90, 100. Needs no GPU."""
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    compiled = triton.compile(variant.source(), GPUTarget("cuda", arch, 32), options)
    ptx = compiled.asm["ptx"]
    registers, spills = assemble(ptx, arch)
    return Report(
        variant.name, arch, registers, spills, compiled.metadata.shared, len(ptx.splitlines())
    )


def assemble(ptx: str, arch: int) -> tuple[int, int]:
    """Registers a thread, and bytes spilled to and loaded from local memory, as ptxas says."""
    tool = triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [tool.path, "-v", f"--gpu-name={target[1]}", str(source), "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    used = re.search(r"Used (\d+) registers", said)
    assert used is not None, said
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return int(used[1]), sum(map(int, spills))


def main(archs: tuple[int, ...] = (80, 90, 100), only: str = "") -> None:
    """archs: compute capabilities, as 90 for 9.0. only: a part of the wanted kernels' names."""
    chosen = [variant for variant in variants() if only in variant.name]
    reports = [compile_for(variant, arch) for variant in chosen for arch in archs]
    table = Table("kernel", "sm", "registers", "spilled bytes", "shared bytes", "ptx lines")
    for report in reports:
        table.add_row(*map(str, asdict(report).values()))
    Console(stderr=True).print(table)
    print(json.dumps([asdict(report) for report in reports]))


if __name__ == "__main__":
    tyro.cli(main)
