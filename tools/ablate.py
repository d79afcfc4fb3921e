"""Train variants of one run and compare them: a table, a picture, one JSON line.

    python -m sglang_jetspec.tools.ablate --base run.toml --variants variants.toml --out DIR

`--base` is a file for `jetspec train --config`. `--variants` holds one table of changed options a
variant, such as `[sft]` with `objective = "sft"`. Each variant is a run of its own in DIR/NAME, so
that a killed ablation resumes; variants on the same answers and taps share one capture of states.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from sglang_jetspec.tools.train.config import check, read_settings
from sglang_jetspec.tools.train.data import read_jsonl
from sglang_jetspec.tools.train.run import run

# Settings that decide what a capture of target states holds.
FEATURE_KEYS = ("target", "prompts", "answers", "data", "max_sequence_tokens", "target_layer_ids")


@dataclass(frozen=True)
class AblateConfig:
    """Train and compare variants."""

    base: Path
    """Settings that all variants share; `answers` must be among them."""
    variants: Path
    """One table of changed options a variant."""
    out: Path
    """Folder for the runs, `ablation.json` and `ablation.png`."""


def ablate(config: AblateConfig) -> dict[str, dict[str, Any]]:
    """Train every variant; returns the last row of held-out measurements of each.

    Raises ValueError for settings that do not fit, before any variant is trained.
    """
    base = read_settings(config.base)
    variants = read_settings(config.variants)
    if "answers" not in base:
        raise ValueError(f"{config.base} lacks `answers`; variants must train on the same ones")
    if base.get("evaluate_examples") == 0:
        raise ValueError(f"{config.base}: evaluate_examples is 0; variants are compared by it")
    if not variants:
        raise ValueError(f"{config.variants} holds no variant; add a table such as [sft]")
    runs = {}
    for name, changes in variants.items():
        if not isinstance(changes, dict):
            raise ValueError(f"{config.variants}: {name} is no table; options stand in one")
        settings = {**base, **changes, "out": str(config.out / name)}
        kept = json.dumps([settings.get(key) for key in FEATURE_KEYS])
        key = hashlib.sha256(kept.encode()).hexdigest()[:12]
        settings.setdefault("features_dir", str(config.out / f"features-{key}"))
        runs[name] = check(settings, f"{config.variants}, [{name}]")
    results = {}
    for name, settings in runs.items():
        run(settings)
        rows = [row for row in read_jsonl(settings.out / "log.jsonl") if "held_out_kl" in row]
        if not rows:
            raise ValueError(f"[{name}] holds out no task; raise held_out_share")
        results[name] = rows[-1]
    return results


def plot(out: Path, names: list[str], path: Path) -> None:
    """Held-out divergence and acceptance length of every variant over its steps."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    divergence, acceptance = figure.subplots(1, 2)
    for name in names:
        rows = [row for row in read_jsonl(out / name / "log.jsonl") if "held_out_kl" in row]
        steps = [row["step"] for row in rows]
        divergence.plot(steps, [row["held_out_kl"] for row in rows], marker=".", label=name)
        tree = list(rows[-1]["acceptance_length"])[-1]
        lengths = [row["acceptance_length"][tree] for row in rows]
        acceptance.plot(steps, lengths, marker=".", label=name)
        acceptance.set(title=f"Held-out acceptance length, {tree}", xlabel="step")
    divergence.set(title="Held-out forward KL", xlabel="step")
    for axes in (divergence, acceptance):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train the variants; print a table and one JSON line."""
    config = tyro.cli(AblateConfig)
    results = ablate(config)
    plot(config.out, list(results), config.out / "ablation.png")
    (config.out / "ablation.json").write_text(json.dumps(results, indent=2) + "\n")
    trees = list(next(iter(results.values()))["acceptance_length"])
    table = Table("variant", "step", "held-out KL", *trees, title="Committed tokens a round")
    for name, row in results.items():
        lengths = (f"{row['acceptance_length'][tree]:.2f}" for tree in trees)
        table.add_row(name, str(row["step"]), f"{row['held_out_kl']:.3f}", *lengths)
    Console(stderr=True).print(table)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
