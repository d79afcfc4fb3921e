"""Acceptance length over tree budget as a picture."""

import os
import re
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_jetspec.tools.intervals import Interval

# Of a tree's label, such as "tree64" or "entropy-16".
KIND_AND_NODES = re.compile(r"(.*?)-?(\d+)")


def plot_acceptance(found: dict[str, dict[str, dict[str, Interval]]], path: Path) -> None:
    """A panel a prompt set of `found` (by head, set, tree), a line a head and kind of tree.

    The chain, whose budget is the head's depth, is a broken line across.
    """
    sets = list(next(iter(found.values())))
    figure = Figure(figsize=(4.6 * len(sets), 4.2), layout="constrained")
    panels = figure.subplots(1, len(sets), squeeze=False)[0]
    names = short_names(list(found))
    for panel, name in zip(panels, sets, strict=True):
        for number, (head, by_set) in enumerate(found.items()):
            _head(panel, f"C{number}", names[head], by_set[name])
        panel.set(title=name, xlabel="nodes, root included", xscale="log")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("committed tokens a round")
    panels[-1].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)


def short_names(heads: list[str]) -> dict[str, str]:
    """Each folder by what sets it apart from the others.

    >>> short_names(["runs/a/head", "runs/b/head"])
    {'runs/a/head': 'a', 'runs/b/head': 'b'}
    """
    if len(heads) == 1:
        return {heads[0]: Path(heads[0]).name}
    before = os.path.commonpath([os.path.abspath(head) for head in heads])
    parts = [Path(os.path.relpath(os.path.abspath(head), before)).parts for head in heads]
    same_end = len({part[-1] for part in parts}) == 1 and all(len(part) > 1 for part in parts)
    kept = [os.path.join(*(part[:-1] if same_end else part)) for part in parts]
    return dict(zip(heads, kept, strict=True))


def _head(panel: Axes, colour: str, name: str, trees: dict[str, Interval]) -> None:
    lines: dict[str, list[tuple[int, Interval]]] = defaultdict(list)
    for label, interval in trees.items():
        kind, nodes = KIND_AND_NODES.fullmatch(label).groups()  # type: ignore[union-attr]
        lines[kind].append((int(nodes), interval))
    styles = iter(("-", "-.", ":"))
    for kind, points in lines.items():
        if kind == "chain":
            panel.axhline(points[0][1].mean, color=colour, linestyle="--", label=f"{name}, chain")
            continue
        means = [interval.mean for _, interval in points]
        errors = [
            [interval.mean - interval.low for _, interval in points],
            [interval.high - interval.mean for _, interval in points],
        ]
        nodes = [count for count, _ in points]
        style = next(styles, "-")
        panel.errorbar(
            nodes, means, errors, color=colour, linestyle=style, capsize=2, label=f"{name}, {kind}"
        )
    trees = (points for kind, points in lines.items() if kind != "chain")
    ticks = sorted({nodes for points in trees for nodes, _ in points})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
