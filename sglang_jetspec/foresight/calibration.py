"""Calibrated outcome scores: what the decoder's estimates are worth, learnt from past rounds.

The chance r_i that draft i is accepted, given that those before it were, is a logistic function of
six features of the round; the bonus token's law gets a temperature; outcomes below a threshold per
accepted length are not worth a draft (JetSpec++ paper, appendix B.1, names six coefficients, an
anchor temperature and split-conformal thresholds; the features are this project's choice).

Shapes: B requests, g drafts, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from sglang_jetspec.foresight.outcomes import (
    Outcomes,
    acceptance_probabilities,
    log_length_law,
    rank_outcomes,
    without_next_draft,
)

FEATURES = ("one", "decoder_logit", "decoder_argmax", "draft_logprob", "decoder_entropy", "depth")
CERTAIN = 1e-9  # probabilities are kept this far from 0 and 1, where logits are infinite
VERSION = 1


class CalibrationError(ValueError):
    """A calibration cannot be used; the message names the field, its value and the fix."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a block while it is being verified."""

    drafts: Tensor  # [B, g] int64
    draft_logprobs: Tensor  # [B, g] fp32 the head's log-probability of each draft
    law: Tensor  # [B, g+1, V] fp32 the decoder's estimate of the target's law


class ClassCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fitted values for one temperature class.

    coefficients: of `FEATURES`. anchor_temperature: > 0. thresholds: for each accepted length the
    least score worth a draft; lengths past the end use the last one; empty drops nothing.
    acceptance_rate: of single drafts, for the geometric rule.
    """

    coefficients: tuple[float, float, float, float, float, float]
    anchor_temperature: float
    thresholds: tuple[float, ...] = ()
    epsilon: float = 0.0
    acceptance_rate: float = 0.8


IDENTITY = ClassCalibration(coefficients=(0.0, 1.0, 0.0, 0.0, 0.0, 0.0), anchor_temperature=1.0)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The artefact of `jetspec calibrate`: fitted for one target, adapter and block size.

    classes: by "greedy" (temperature 0) and "sampled". adapter_sha256: of the adapter's weights.
    """

    target: str
    adapter_sha256: str
    block_size: int
    classes: dict[str, ClassCalibration]
    version: int = VERSION

    def of(self, greedy: bool) -> ClassCalibration:
        """The fitted values for a request; CalibrationError when its class was not fitted."""
        name = temperature_class(greedy)
        if name not in self.classes:
            raise CalibrationError(
                f"the calibration has classes {sorted(self.classes)}, the request needs {name!r}; "
                f"run `jetspec calibrate` with rounds of that class"
            )
        return self.classes[name]


def temperature_class(greedy: bool) -> str:
    """Key of `Calibration.classes`."""
    return "greedy" if greedy else "sampled"


def load_calibration(
    path: Path, *, target: str | None, adapter_sha256: str, block_size: int
) -> Calibration:
    """Read the artefact and refuse one that was fitted for something else (CalibrationError).

    target: None takes any.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError) as error:
        raise CalibrationError(f"{path}: {error}; run `jetspec calibrate` again") from error
    expected = {"target": target, "adapter_sha256": adapter_sha256, "block_size": block_size}
    for name, value in {**expected, "version": VERSION}.items():
        if value is not None and getattr(found, name) != value:
            raise CalibrationError(
                f"{path}: {name} is {getattr(found, name)!r}, this server has {value!r}; run "
                f"`jetspec calibrate` for this target, adapter and block size"
            )
    return found


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write the artefact as indented JSON."""
    encoded = msgspec.json.format(msgspec.json.encode(calibration), indent=2)
    Path(path).write_bytes(encoded + b"\n")


@lru_cache(maxsize=64)
def constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers on a device, copied there once: a copy from the host waits for the device."""
    return torch.tensor(values, device=device)


def features(evidence: Evidence) -> Tensor:
    """[B, g, 6] fp32 features of each draft, in the order of `FEATURES`."""
    law, drafts = evidence.law[:, :-1], evidence.drafts
    accept = acceptance_probabilities(drafts, evidence.law)
    depth = torch.arange(1, drafts.shape[1] + 1, device=drafts.device) / drafts.shape[1]
    columns = [
        torch.ones_like(accept),
        torch.logit(accept.double(), eps=CERTAIN).float(),
        (law.argmax(2) == drafts).float(),
        evidence.draft_logprobs.float(),
        torch.special.entr(law).sum(2),
        depth.expand_as(accept),
    ]
    return torch.stack(columns, dim=2)


def hazards(evidence: Evidence, fitted: ClassCalibration) -> Tensor:
    """[B, g] calibrated chance of accepting each draft, given that those before it were."""
    weights = constants(fitted.coefficients, evidence.drafts.device)
    logits = (features(evidence).double() * weights).sum(-1)
    return torch.sigmoid(logits).clamp(CERTAIN, 1 - CERTAIN)


def tempered_bonus_law(evidence: Evidence, temperature: float) -> Tensor:
    """[B, g+1, V] law of the bonus token, the next draft excluded, at `temperature`."""
    rest = without_next_draft(evidence.drafts, evidence.law)
    powered = (rest / rest.amax(2, keepdim=True).clamp(min=1e-30)) ** (1 / temperature)
    total = powered.sum(2, keepdim=True)
    return torch.where(total > 0, powered / total.clamp(min=1e-30), 0.0)


def calibrated_outcomes(evidence: Evidence, fitted: ClassCalibration, count: int) -> Outcomes:
    """The best `count` outcomes by calibrated score; those below their threshold are dropped."""
    bonus = tempered_bonus_law(evidence, fitted.anchor_temperature)
    log_lengths = log_length_law(hazards(evidence, fitted)).to(bonus.dtype)
    ranked = rank_outcomes(log_lengths, bonus, count)
    if not fitted.thresholds:
        return ranked
    least = tuple(math.log(max(t, 1e-30)) for t in fitted.thresholds)
    floor = constants(least, ranked.scores.device)
    index = ranked.lengths.clamp(max=len(least) - 1)
    scores = ranked.scores.masked_fill(ranked.scores < floor[index], float("-inf"))
    return Outcomes(ranked.lengths, ranked.anchors, scores)
