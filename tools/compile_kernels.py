"""Compile the kernels for GPUs that are not there; print registers, spills and shared memory.

    python -m sglang_jetspec.tools.compile_kernels --architectures 90

The last line is one JSON list. Exit code 1 when code spills more than 256 bytes a thread.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module

import tyro

# Folders of `kernels/` with a `variants.py`.
KERNELS = ("tree_attention", "tree_build", "tree_accept", "commit", "draft_kv")


def main(
    kernels: tuple[str, ...] = KERNELS,
    architectures: tuple[int, ...] = (80, 90, 100),
    match: str = "",
) -> int:
    """Compile every variant of the kernels for every architecture.

    Args:
        kernels: folders of `kernels/`.
        architectures: compute capabilities times ten; by default of A100, H100 and H200, B200.
        match: only variants whose name contains this.
    """
    os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported, below
    from rich.console import Console
    from rich.table import Table
    from tqdm import tqdm

    from sglang_jetspec.kernels.ahead_of_time import compile_variant

    variants = [
        variant
        for name in kernels
        for variant in import_module(f"sglang_jetspec.kernels.{name}.variants").VARIANTS
        if match in variant.name
    ]
    jobs = [(variant, architecture) for variant in variants for architecture in architectures]
    found = [compile_variant(*job) for job in tqdm(jobs, desc="compile", leave=False)]
    table = Table("kernel", "sm", "registers", "spilled B", "shared B", "threads", "matrix")
    for one in found:
        table.add_row(*map(str, asdict(one).values()))
    Console().print(table)
    print(json.dumps([asdict(one) for one in found]))
    return int(any(one.spilled > 256 for one in found))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
