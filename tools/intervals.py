"""Bootstrap intervals of acceptance lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import bootstrap

LEVEL, RESAMPLES = 0.95, 2000


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; nan where nothing was measured."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def mean_interval(rounds: Sequence[Sequence[int]]) -> Interval:
    """Mean committed tokens over all rounds of all answers, and its 95 % percentile interval.

    rounds: of each answer, the committed tokens of its rounds. Whole answers are drawn again, since
    the rounds of one answer are not independent. Seeded; one answer alone has no width.
    """
    kept = [answer for answer in rounds if answer]
    if not kept:
        return Interval(float("nan"), float("nan"), float("nan"))
    tokens = np.array([sum(answer) for answer in kept], dtype=float)
    counts = np.array([len(answer) for answer in kept], dtype=float)
    mean = float(tokens.sum() / counts.sum())
    if len(kept) == 1:
        return Interval(mean, mean, mean)
    found = bootstrap(
        (tokens, counts),
        lambda t, n, axis: t.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(mean, float(found.low), float(found.high))
