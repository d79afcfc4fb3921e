"""Compile Triton kernels for GPUs that are not there, and read what the code uses.

Needs Triton's wheel alone: it brings ptxas and cuobjdump. Triton must not be in interpreter mode.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_MATRIX = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel.

    signature: Triton type per run-time argument ("*bf16", "i32", "fp32"), in order; a name in
    `constants` needs none. divisible: arguments that are multiples of 16, as in real launches.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """Per thread: registers and bytes of local memory (spills). Per block: bytes of shared memory
    and threads. matrix: the tensor-core instruction used, "" for none."""

    name: str
    architecture: int
    registers: int
    spilled: int
    shared: int
    threads: int
    matrix: str


def compile_variant(variant: Variant, architecture: int) -> Resources:
    """Compile down to machine code. Raises what Triton or ptxas raise."""
    names = variant.kernel.arg_names
    signature = {
        name: "constexpr" if name in variant.constants else variant.signature[name]
        for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible}
    source = ASTSource(variant.kernel, signature, variant.constants, attributes)
    target = GPUTarget("cuda", architecture, 32)
    compiled = triton.compile(source, target=target, options=dict(variant.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def used(what: str) -> int:
        found = re.search(rf"\b{what}:(\d+)", usage)
        if found is None:
            raise ValueError(f"cuobjdump reports no {what}: {usage}")
        return int(found.group(1))

    return Resources(
        variant.name,
        architecture,
        registers=used("REG"),
        spilled=used("STACK") + used("LOCAL"),
        shared=int(compiled.metadata.shared),
        threads=32 * int(compiled.metadata.num_warps),
        matrix=next((name for name in _MATRIX if name in compiled.asm["ptx"]), ""),
    )
