"""What every kernel's benchmark does alike."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import torch


def median_us(call: Callable[[], Any], device: str) -> float:
    """Microseconds of a call, launch overhead left out on a GPU; one plain run on a CPU."""
    if device == "cpu":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    from triton.testing import do_bench_cudagraph

    call()  # compiles
    return float(do_bench_cudagraph(call)) * 1e3


@cache
def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written, of a copy too large for the cache."""
    source = torch.zeros(
        (1 << 30) if device != "cpu" else (1 << 22), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source), device) * 1e6


def print_result(result: Any) -> None:
    """The fields of a dataclass, one a line, and the whole of it as one JSON line."""
    fields = asdict(result)
    for name, value in fields.items():
        print(f"{name}: {value}")
    print(json.dumps(fields))
