"""Training state on disk: `checkpoint-<step>.pt`, read back without unpickling code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Progress:
    """How far a run is; `seconds` is wall-clock time over all its resumed parts."""

    step: int = 0
    seconds: float = 0.0


def save_checkpoint(folder: Path, progress: Progress, states: dict[str, Any], keep: int) -> Path:
    """Write atomically, then delete all but the `keep` newest checkpoints."""
    path = folder / f"checkpoint-{progress.step:07d}.pt"
    partial = path.with_suffix(".partial")
    torch.save({"step": progress.step, "seconds": progress.seconds, **states}, partial)
    partial.rename(path)
    for old in list_checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("checkpoint-*.pt"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The states given to `save_checkpoint`, plus "step" and "seconds"."""
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
