"""What made an artefact: command lines, settings and versions, kept beside it as `run.json`."""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from sglang_jetspec.tools.train.config import OPERATION, TrainConfig

RUN_FILE = "run.json"
PACKAGES = ("sglang-jetspec", "sglang", "torch", "transformers", "accelerate", "safetensors")
# What may change between two launches of one run: the batches drawn stay the same.
FREE = OPERATION | {
    "answers",
    "generation",
    "steps",
    "minutes",
    "learning_rate",
    "schedule",
    "warmup_share",
    "weight_decay",
    "dropout",
    "max_grad_norm",
}


def record_launch(config: TrainConfig, path: Path) -> None:
    """Add this launch to those in `path`.

    Raises ValueError by name for a setting that differs from the run's first launch and changes
    what it trains on.
    """
    settings = json.loads(msgspec.json.encode(config, enc_hook=str))
    run: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"launches": []}
    for first in run["launches"][:1]:
        for name, value in settings.items():
            earlier = first["settings"].get(name, value)
            if name not in FREE and earlier != value:
                raise ValueError(
                    f"{name} is {value!r}, the run in {path.parent} has {earlier!r}; give that "
                    f"value to resume it, or another --out to start a new run"
                )
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    run["launches"].append({"argv": sys.argv, "settings": settings, "versions": versions})
    path.write_text(json.dumps(run, indent=2) + "\n")


def record_data(facts: dict[str, Any], path: Path) -> None:
    """Add sizes and origin of the training data to `path`."""
    run = json.loads(path.read_text())
    path.write_text(json.dumps({**run, "data": facts}, indent=2) + "\n")
