"""Bootstrap intervals of acceptance lengths."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


Rounds = Sequence[Sequence[int]]
NOTHING = Interval(float("nan"), float("nan"), float("nan"))


def mean_interval(rounds: Rounds) -> Interval:
    """Mean committed tokens over all rounds of all answers, and its 95 % percentile interval.

    rounds: of each answer, the committed tokens of its rounds. Whole answers are drawn again, since
    the rounds of one answer are not independent. Seeded; one answer alone has no width.
    """
    return _interval([_sums(answer) for answer in rounds if answer], _mean)


def ratio_interval(rounds: Rounds, baseline: Rounds) -> Interval:
    """How many times the `baseline`'s mean `rounds` commit, both of the same answers.

    An answer is drawn again for both at once, so that what makes it easy for both cancels.
    Raises ValueError when the answers are not as many.
    """
    pairs = zip(rounds, baseline, strict=True)
    samples = [_sums(ours) + _sums(theirs) for ours, theirs in pairs if ours and theirs]
    return _interval(samples, lambda a, b, c, d, axis: _mean(a, b, axis) / _mean(c, d, axis))


def _sums(answer: Sequence[int]) -> tuple[int, ...]:
    return sum(answer), len(answer)


def _mean(tokens: Any, counts: Any, axis: int) -> Any:
    return tokens.sum(axis) / counts.sum(axis)


def _interval(samples: Sequence[tuple[int, ...]], statistic: Callable[..., Any]) -> Interval:
    """`statistic` of the columns of `samples`, whose rows are drawn again."""
    if not samples:
        return NOTHING
    columns = tuple(np.array(samples, dtype=float).T)
    value = float(statistic(*columns, axis=0))
    if len(samples) == 1:
        return Interval(value, value, value)
    found = bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=True,
        confidence_level=LEVEL,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))
