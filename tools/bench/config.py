"""Options of `jetspec bench` and `jetspec trace`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class BenchConfig:
    """Compare arms on real servers, one after the other, never two at once.

    Each arm's server is started anew for every repeat, in turn (A, B, A, B, ...), warmed up, asked
    every prompt greedily, and ended. The last line on stdout is one JSON object.
    """

    data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction]
    """JSON-lines file, or folder of them, with rows {id, task, turns, answer}; may be repeated."""
    arms: str = "ar,jetspec"
    """Arms: ar, ar_torch_native (CPU), jetspec, jetspec:n=16,w=4,d=7,tree=algorithm1. Speed-ups
    are over the fastest of the ar arms."""
    target: str | None = None
    """Target model folder or hub id; the demo target if left out."""
    head: str | None = None
    """Draft head folder or hub id; the demo head if left out."""
    limit: int | None = None
    """Rows taken from each data file."""
    max_tokens: int = 128
    """Longest answer, in tokens."""
    batch: int = 1
    """Requests in flight."""
    repeats: int = 2
    """Server starts per arm."""
    ignore_eos: bool = False
    """Always write max-tokens tokens."""
    dtype: str = "bfloat16"
    """Precision of target and head; answers are compared id by id, exact only in float32."""
    server_args: str = ""
    """More flags for every server, as one quoted text."""
    out: Path | None = None
    """Folder for summary.json, passes.jsonl (raw samples) and the server logs."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("--data is missing; name at least one JSON-lines file or folder")
        for name in ("limit", "max_tokens", "batch", "repeats"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; use at least 1")


@dataclass(frozen=True)
class TraceConfig:
    """Draw the timeline of a few decoding rounds of a real server."""

    out: Path
    """Folder for trace.json, trace.png and the server's log."""
    arm: str = "jetspec"
    """What to serve, as for `jetspec bench`: jetspec:n=16,j=1,r=1,b=4,executor=thread,core=1."""
    target: str | None = None
    """Target model folder or hub id; the demo target if left out."""
    head: str | None = None
    """Draft head folder or hub id; the demo head if left out."""
    rounds: int = 6
    """Rounds on record."""
    batch: int = 1
    """Requests in flight."""
    dtype: str = "bfloat16"
    server_args: str = ""
    """More flags for the server, as one quoted text."""

    def __post_init__(self) -> None:
        for name in ("rounds", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; use at least 1")
