"""Fit a calibration to played rounds: logistic hazards, bonus temperature, conformal thresholds.

N rounds, g drafts, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from sglang_jetspec.foresight.calibration import (
    CERTAIN,
    CalibrationError,
    ClassCalibration,
    features,
)
from sglang_jetspec.foresight.outcomes import bonus_law, log_length_law
from sglang_jetspec.tools.foresight.rounds import Round

LEAST_ROUNDS = 50


@dataclass(frozen=True)
class Observed:
    """Rounds reduced to what the fit reads."""

    features: Tensor  # [N, g, 6] fp32
    lengths: Tensor  # [N] accepted drafts k
    bonus: Tensor  # [N, V] fp16: the decoder's law of the bonus token at the true k
    anchors: Tensor  # [N] the true bonus token

    def __len__(self) -> int:
        return len(self.lengths)

    def halves(self) -> tuple["Observed", "Observed"]:
        """Two random halves, the same ones every time."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(0))
        return self.part(order[::2]), self.part(order[1::2])

    def part(self, rows: Tensor) -> "Observed":
        """Some of the rounds."""
        return Observed(*(x[rows] for x in (self.features, self.lengths, self.bonus, self.anchors)))


def observe(rounds: Iterable[Round]) -> Observed:
    """Reduce rounds as they are played."""
    parts: list[tuple[Tensor, ...]] = []
    for played in rounds:
        assert played.evidence is not None, "play the rounds with collect_evidence"
        law = bonus_law(played.evidence.drafts, played.evidence.law)
        at = law[torch.arange(len(law)), played.lengths]
        fields = (features(played.evidence), played.lengths, at.half(), played.anchors)
        parts.append(tuple(x[played.live] for x in fields))
    return Observed(*(torch.cat(column) for column in zip(*parts, strict=True)))


def fit_class(observed: Observed, epsilon: float = 0.1) -> ClassCalibration:
    """Hazards and temperature from one half of the rounds, thresholds from the other.

    Raises CalibrationError with too few rounds.
    """
    if len(observed) < LEAST_ROUNDS:
        raise CalibrationError(
            f"{len(observed)} rounds are too few to calibrate; give prompts for {LEAST_ROUNDS} "
            "or more"
        )
    fitting, held = observed.halves()
    coefficients = fit_hazards(fitting)
    temperature = fit_temperature(fitting)
    scores = outcome_scores(held, coefficients, temperature)
    return ClassCalibration(
        coefficients=coefficients,
        anchor_temperature=temperature,
        thresholds=conformal_thresholds(scores, held.lengths, held.features.shape[1], epsilon),
        epsilon=epsilon,
        acceptance_rate=acceptance_rate(observed),
    )


def judged_drafts(observed: Observed) -> tuple[Tensor, Tensor]:
    """Features [M, 6] of the drafts that verification judged, and whether it accepted them [M]."""
    steps = torch.arange(observed.features.shape[1])
    judged = steps <= observed.lengths[:, None]
    accepted = steps < observed.lengths[:, None]
    return observed.features[judged], accepted[judged]


def fit_hazards(observed: Observed) -> tuple[float, float, float, float, float, float]:
    """Logistic regression of acceptance on the six features."""
    inputs, accepted = judged_drafts(observed)
    if accepted.all() or not accepted.any():
        raise CalibrationError(
            "every draft had the same fate; calibrate on prompts where some are refused"
        )
    model = LogisticRegression(C=100.0, fit_intercept=False, max_iter=5000)
    model.fit(inputs.double().numpy(), accepted.numpy())
    one, logit, best, draft, entropy, depth = (float(c) for c in model.coef_[0])
    return one, logit, best, draft, entropy, depth


def fit_temperature(observed: Observed) -> float:
    """The temperature that makes the true bonus tokens most likely."""
    log_law = observed.bonus.float().clamp(min=CERTAIN).log()

    def loss(log_temperature: float) -> float:
        tempered = (log_law / float(np.exp(log_temperature))).log_softmax(-1)
        return -float(tempered.gather(1, observed.anchors[:, None]).mean())

    found = minimize_scalar(loss, bounds=(-1.5, 1.5), method="bounded")
    return float(np.exp(found.x))


def outcome_scores(observed: Observed, coefficients: Sequence[float], temperature: float) -> Tensor:
    """[N] fp64 calibrated score of each round's true outcome."""
    weights = torch.tensor(coefficients, dtype=torch.float64)
    hazards = torch.sigmoid(observed.features.double() @ weights).clamp(CERTAIN, 1 - CERTAIN)
    lengths = log_length_law(hazards).gather(1, observed.lengths[:, None]).squeeze(1)
    law = observed.bonus.double() ** (1 / temperature)
    chosen = law.gather(1, observed.anchors[:, None]).squeeze(1)
    return lengths.exp() * chosen / law.sum(1).clamp(min=1e-300)


def conformal_thresholds(
    scores: Tensor, lengths: Tensor, drafts: int, epsilon: float
) -> tuple[float, ...]:
    """For each length the score that its true outcome reaches with probability >= 1 - epsilon.

    Split conformal by length (Mondrian): the floor(epsilon (n + 1))-th smallest of the n scores
    seen, 0 when there are too few.
    """
    thresholds = []
    for k in range(drafts + 1):
        seen = scores[lengths == k].sort().values
        rank = int(epsilon * (len(seen) + 1))
        thresholds.append(float(seen[rank - 1]) if rank else 0.0)
    return tuple(thresholds)


def acceptance_rate(observed: Observed) -> float:
    """Accepted share of the drafts that verification judged."""
    _, accepted = judged_drafts(observed)
    return float(accepted.float().mean().clamp(0.01, 0.99))
