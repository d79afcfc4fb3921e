"""Export a head from a training run's checkpoint, finished or not.

python -m sglang_jetspec.tools.export_head --checkpoint RUN --out DIR
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from sglang_jetspec.tools.train.checkpoint import list_checkpoints
from sglang_jetspec.tools.train.export import export_checkpoint


@dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint as `config.json` and `model.safetensors`."""

    checkpoint: Path
    """A `checkpoint-*.pt` file, or a run folder for its newest one."""
    out: Path


def newest_checkpoint(path: Path) -> Path:
    """`path` itself if a file, else the newest checkpoint in it; ValueError without one."""
    if path.is_file():
        return path
    found = list_checkpoints(path)
    if not found:
        raise ValueError(f"--checkpoint {path} holds no checkpoint-*.pt; give a run's --out folder")
    return found[-1]


def main() -> None:
    """Export; print the checkpoint and the head's folder as one JSON line."""
    config = tyro.cli(ExportConfig)
    checkpoint = newest_checkpoint(config.checkpoint)
    export_checkpoint(checkpoint, config.out)
    print(json.dumps({"checkpoint": str(checkpoint), "head": str(config.out)}))


if __name__ == "__main__":
    main()
