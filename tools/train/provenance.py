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
FREE = OPERATION | {"answers", "generation", "steps", "minutes"}


def record_launch(config: TrainConfig, path: Path) -> dict[str, Any]:
    """Add this launch to `path` and return what it holds then.

    Raises ValueError by name for a setting that differs from the run's first launch and changes
    what it trains on.
    """
    settings = json.loads(msgspec.json.encode(config, enc_hook=str))
    run: dict[str, Any] = {"settings": settings, "launches": []}
    if path.exists():
        run["launches"] = json.loads(path.read_text())["launches"]
        first = json.loads(path.read_text())["settings"]
        for name, value in settings.items():
            if name not in FREE and first.get(name, value) != value:
                raise ValueError(
                    f"{name} is {value!r}, the run in {path.parent} has {first[name]!r}; give "
                    f"that value to resume it, or another --out to start a new run"
                )
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    run["launches"].append({"argv": sys.argv, "seed": config.seed, "versions": versions})
    path.write_text(json.dumps(run, indent=2) + "\n")
    return run


def record_data(facts: dict[str, Any], path: Path) -> None:
    """Add sizes and origin of the training data to `path`."""
    run = json.loads(path.read_text())
    path.write_text(json.dumps({**run, "data": facts}, indent=2) + "\n")
