"""A run's curves as one picture, from its log."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_jetspec.tools.train.data import read_jsonl

Rows = list[dict[str, Any]]


def plot_run(log: Path, path: Path) -> None:
    """Loss, accuracy by draft position and acceptance length over steps, as PNG or SVG."""
    rows = list(read_jsonl(log))
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    loss, accuracy, acceptance = figure.subplots(1, 3)
    _lines(loss, rows, "loss", "training")
    _lines(loss, rows, "held_out_loss", "held out")
    loss.set(title="Loss", xlabel="step", ylim=(0, None))
    _positions(accuracy, rows)
    accuracy.set(title="Held-out top-1 agreement by draft position", xlabel="step", ylim=(0, 1))
    evaluated = [row for row in rows if "acceptance_length" in row]
    for label in evaluated[-1]["acceptance_length"] if evaluated else ():
        values = [row["acceptance_length"][label] for row in evaluated]
        acceptance.plot([row["step"] for row in evaluated], values, marker=".", label=label)
    acceptance.set(title="Held-out acceptance length", xlabel="step", ylabel="tokens a round")
    for axes in (loss, accuracy, acceptance):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _lines(axes: Axes, rows: Rows, key: str, label: str) -> None:
    found = [row for row in rows if key in row]
    if found:
        axes.plot([row["step"] for row in found], [row[key] for row in found], label=label)


def _positions(axes: Axes, rows: Rows) -> None:
    """One line a draft position; of training where nothing is held out."""
    held_out = any("held_out_accuracy" in row for row in rows)
    key = "held_out_accuracy" if held_out else "accuracy"
    found = [row for row in rows if key in row]
    depth = len(found[0][key]) if found else 0
    colours = matplotlib.colormaps["viridis"]
    for position in range(depth):
        values = [row[key][position] for row in found]
        colour = colours(position / max(depth - 1, 1))
        axes.plot([row["step"] for row in found], values, color=colour, label=str(position + 1))
