"""A trace's spans as a picture: a lane a thread or stream, stages by colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Stages that enclose others are drawn as frames.
FRAMES = ("round", "run_batch")
COLOURS = {
    "draft": "#4c9be8",
    "propose": "#4c9be8",
    "foresee": "#f2a93b",
    "verify": "#57a773",
    "accept": "#9d6bce",
    "commit": "#c95d63",
    "adapter": "#8c6d4f",
    "join": "#d6d03a",
    "schedule": "#bbbbbb",
    "process_result": "#888888",
}


@dataclass(frozen=True)
class Span:
    """Times in milliseconds from the start of the trace. place: host or device. lane: in it."""

    stage: str
    place: str
    lane: str
    start: float
    length: float


def in_order(spans: Iterable[Span]) -> list[Span]:
    """By start, enclosing spans before what they enclose."""
    return sorted(spans, key=lambda span: (span.start, -span.length))


def draw(spans: Sequence[Span], path: Path) -> None:
    """Write the picture, PNG or SVG."""
    lanes = list(dict.fromkeys((span.place, span.lane) for span in spans))
    figure = Figure(figsize=(14, 1.6 + 0.8 * len(lanes)), layout="constrained")
    axes: Axes = figure.subplots()
    for span in spans:
        row = lanes.index((span.place, span.lane))
        if span.stage in FRAMES:
            axes.broken_barh(
                [(span.start, span.length)], (row - 0.42, 0.84), facecolor="none", edgecolor="k"
            )
        elif span.stage in COLOURS:
            axes.broken_barh(
                [(span.start, span.length)], (row - 0.34, 0.68), facecolor=COLOURS[span.stage]
            )
    axes.set_yticks(range(len(lanes)), [f"{place}\n{lane}" for place, lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    seen = {span.stage for span in spans}
    shown = [stage for stage in COLOURS if stage in seen]
    figure.legend(
        handles=[Patch(color=COLOURS[stage], label=stage) for stage in shown],
        loc="outside upper center",
        ncols=len(shown),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
