"""Which outcomes get a foresight draft: a registry of rules, B.4 of the JetSpec++ paper.

Every rule ranks bonus tokens by the decoder's law; the rules differ in how they score the accepted
length. The calibrated rule is served; the others are for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_jetspec.foresight.calibration import (
    CERTAIN,
    IDENTITY,
    ClassCalibration,
    Evidence,
    calibrated_outcomes,
    constants,
)
from sglang_jetspec.foresight.fan_out import integer_fan_out, length_law
from sglang_jetspec.foresight.outcomes import (
    Outcomes,
    acceptance_probabilities,
    bonus_law,
    log_length_law,
    rank_outcomes,
    sort_outcomes,
)


@dataclass(frozen=True)
class RuleSettings:
    """What a rule may need: the fitted values, and the exponent of SSD's assumed hit rate."""

    calibration: ClassCalibration = IDENTITY
    rho: float = 1.0


Rule = Callable[[Evidence, int, RuleSettings], Outcomes]


def calibrated(evidence: Evidence, count: int, settings: RuleSettings) -> Outcomes:
    """Calibrated lengths and bonus tokens."""
    return calibrated_outcomes(evidence, settings.calibration, count)


def uncalibrated(evidence: Evidence, count: int, settings: RuleSettings) -> Outcomes:
    """The decoder's own estimate of P(k, a)."""
    accept = acceptance_probabilities(evidence.drafts, evidence.law).clamp(max=1.0)
    bonus = bonus_law(evidence.drafts, evidence.law)
    return rank_outcomes(log_length_law(accept), bonus, count)


def draft_score(evidence: Evidence, count: int, settings: RuleSettings) -> Outcomes:
    """Lengths by the draft head's own probabilities of its tokens."""
    accept = evidence.draft_logprobs.float().exp().clamp(CERTAIN, 1 - CERTAIN)
    bonus = bonus_law(evidence.drafts, evidence.law)
    return rank_outcomes(log_length_law(accept), bonus, count)


def geometric(evidence: Evidence, count: int, settings: RuleSettings) -> Outcomes:
    """SSD's fixed fan-out: the same number of bonus tokens for a length in every round."""
    drafts = evidence.drafts.shape[1]
    law = length_law(settings.calibration.acceptance_rate, drafts)
    fan_out = integer_fan_out(law, count, settings.rho)
    bonus = bonus_law(evidence.drafts, evidence.law)
    device = bonus.device
    best, anchors = bonus.topk(min(max(fan_out), bonus.shape[2]), dim=2)
    fan_outs = constants(tuple(map(float, fan_out)), device)
    kept = torch.arange(best.shape[2], device=device) < fan_outs.unsqueeze(1)
    scores = (constants(tuple(law), device)[:, None] * best).log()
    scores = scores.masked_fill(~kept, float("-inf"))
    lengths = torch.arange(drafts + 1, device=device)[None, :, None].expand_as(scores)
    return sort_outcomes(lengths.flatten(1), anchors.flatten(1), scores.flatten(1), count)


RULES: dict[str, Rule] = {
    "calibrated": calibrated,
    "uncalibrated": uncalibrated,
    "draft_score": draft_score,
    "geometric": geometric,
}
