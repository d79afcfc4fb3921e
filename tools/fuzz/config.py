"""Options of `jetspec fuzz`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FuzzConfig:
    """Compare JETSPEC with plain decoding on seeded random requests, in float32.

    Real servers, one after the other; greedy answers must be equal in token ids, text, finish
    reason, counts and log-probabilities. Every difference is reduced to a small case, printed and
    written to a file. The last line on stdout is one JSON object; the code is 1 after a difference.
    """

    requests: int = 200
    seed: int = 0
    target: str | None = None
    """Target model folder or hub id; the demo target if left out."""
    head: str | None = None
    """Draft head folder or hub id; the demo head if left out."""
    nodes: int = 16
    """Tree budget, root included."""
    width: int = 4
    depth: int = 7
    context_length: int = 512
    server_args: str = "--max-total-tokens 16384 --max-running-requests 64"
    """More flags for both servers, as one quoted text. The KV pool must hold a whole group: a
    retracted request is no longer penalized by the server without speculation."""
    jetspec_args: str = ""
    """More flags for the JETSPEC server alone."""
    replay: Path | None = None
    """Ask the groups of a file written by an earlier run in place of random ones."""
    out: Path = Path("fuzz-differences")
    """Folder for reduced cases; made when there is one."""

    def __post_init__(self) -> None:
        for name in ("requests", "nodes", "width", "depth", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; use >= 1")
