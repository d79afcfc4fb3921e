"""`OUT/log.jsonl`: averages of recent steps, and held-out measurements, by step.

A row has `step` and `seconds`; rows of training have `loss`, `kl`, `lr`, `grad_norm`,
`chain_acceptance` and `accuracy` (one value a draft position), rows of an evaluation the same names
with `held_out_` before them and `acceptance_length` by tree.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sglang_jetspec.tools.train.checkpoint import Progress
from sglang_jetspec.tools.train.data import drop_partial_line, read_jsonl
from sglang_jetspec.tools.train.plot import plot_run

Step = dict[str, Any]


class RunLog:
    """Appends rows; `recent` holds the measurements of steps not averaged yet: numbers, or lists of
    numbers of one length, under the same names."""

    def __init__(self, path: Path, recent: list[Step]) -> None:
        self._path, self.recent = path, recent

    def rewind(self, step: int) -> None:
        """Drop what a killed run logged after `step`, which is repeated now."""
        drop_partial_line(self._path)
        if self._path.exists():
            rows = [row for row in read_jsonl(self._path) if row["step"] <= step]
            self._path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_average(self, progress: Progress) -> Step:
        """Append and return the averages since the last call."""
        means = {key: np.mean([s[key] for s in self.recent], 0).tolist() for key in self.recent[0]}
        self.write(progress, means)
        self.recent.clear()
        return means

    def plot(self) -> None:
        """Draw what is logged so far, `curves.png` beside the log."""
        if self._path.exists():
            plot_run(self._path, self._path.with_name("curves.png"))

    def write(self, progress: Progress, values: Step) -> None:
        """Append one row."""
        row = {"step": progress.step, "seconds": round(progress.seconds, 3), **values}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
