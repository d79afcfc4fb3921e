"""SSD's geometric fan-out: a fixed number of bonus tokens for each accepted length.

Under an acceptance rate alpha the length k has probability alpha^k (1 - alpha), k < g, and alpha^g
for k = g; F bonus tokens for it are assumed to hit with probability 1 - F^-rho (JetSpec++ paper,
appendix F.2). A length is worth keeping only if it gets more than one token, so that the best
series omits the least likely lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Series:
    """`fan_out[k]` (possibly fractional) tokens for length k; `hit`: the assumed hit rate."""

    fan_out: tuple[float, ...]
    hit: float


def length_law(alpha: float, drafts: int) -> tuple[float, ...]:
    """Probability of each accepted length 0..drafts under the acceptance rate alpha."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}; an acceptance rate lies strictly between 0 and 1")
    return (*(alpha**k * (1 - alpha) for k in range(drafts)), alpha**drafts)


def series_on(law: Sequence[float], budget: float, rho: float, kept: Sequence[int]) -> Series:
    """The best fractional fan-out that gives tokens to the lengths `kept` only."""
    weights = {k: law[k] ** (1 / (1 + rho)) for k in kept}
    total = sum(weights.values())
    fan_out = tuple(budget * weights.get(k, 0.0) / total for k in range(len(law)))
    return Series(fan_out, sum(law[k] * (1 - fan_out[k] ** -rho) for k in kept))


def best_series(law: Sequence[float], budget: float, rho: float) -> Series:
    """The best fractional fan-out over all sets of kept lengths.

    Exchanging a kept length for a likelier one never lowers the hit rate, so that only the sets
    of the m likeliest lengths compete.
    """
    order = sorted(range(len(law)), key=lambda k: (-law[k], k))
    sets = (order[: m + 1] for m in range(len(order)))
    return max((series_on(law, budget, rho, kept) for kept in sets), key=lambda s: s.hit)


@lru_cache(maxsize=256)
def integer_fan_out(law: tuple[float, ...], budget: int, rho: float) -> tuple[int, ...]:
    """The whole-number fan-out of the highest hit rate, by dynamic programming over lengths.

    One token for a length counts as no hit, as in the assumed curve; among equal hit rates the
    fan-out that covers more probability wins.
    """

    def worth(k: int, tokens: int) -> tuple[float, float]:
        return (law[k] * (1 - tokens**-rho), law[k]) if tokens else (0.0, 0.0)

    # spent -> (hit, covered probability, tokens of each length so far)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for k in range(len(law)):
        extended: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for spent, (hit, covered, chosen) in best.items():
            for tokens in range(budget - spent + 1):
                more_hit, more_covered = worth(k, tokens)
                total = (
                    round(hit + more_hit, 12),
                    round(covered + more_covered, 12),
                    (*chosen, tokens),
                )
                extended[spent + tokens] = max(total, extended.get(spent + tokens, total))
        best = extended
    return best[budget][2]
