"""Scores under calibration, thresholds, and the artefact on disk."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jetspec.foresight.calibration import (
    FEATURES,
    IDENTITY,
    Calibration,
    CalibrationError,
    ClassCalibration,
    Evidence,
    calibrated_outcomes,
    features,
    hazards,
    load_calibration,
    save_calibration,
)
from sglang_jetspec.foresight.outcomes import acceptance_probabilities, outcome_law
from sglang_jetspec.foresight.selection import RULES, RuleSettings


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_identity_recovers_the_raw_score(random_evidence, seed):
    evidence = random_evidence(seed)
    accept = acceptance_probabilities(evidence.drafts, evidence.law)
    torch.testing.assert_close(hazards(evidence, IDENTITY).float(), accept, rtol=1e-6, atol=1e-9)
    ranked = calibrated_outcomes(evidence, IDENTITY, 45)
    whole = outcome_law(evidence.drafts, evidence.law)
    for row in range(2):
        expected = whole[row, ranked.lengths[row], ranked.anchors[row]]
        torch.testing.assert_close(ranked.scores[row].exp(), expected, rtol=2e-5, atol=1e-9)


def test_features_are_what_their_names_say():
    law = torch.tensor([[[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [1 / 3, 1 / 3, 1 / 3]]])
    evidence = Evidence(torch.tensor([[0, 2]]), torch.tensor([[-0.1, -2.0]]), law)
    found = features(evidence)[0]
    assert len(FEATURES) == 6
    entropy = -(law[0, 0] * law[0, 0].log()).sum().item()
    expected = [1.0, torch.logit(torch.tensor(0.7)).item(), 1.0, -0.1, entropy, 0.5]
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)
    assert found[1, 2].item() == 0.0
    assert found[1, 5].item() == 1.0


def test_scores_stay_a_law_under_any_coefficients(random_evidence):
    evidence = random_evidence(3)
    fitted = ClassCalibration((0.3, 0.8, 0.5, -0.2, 0.1, -0.6), anchor_temperature=0.7)
    ranked = calibrated_outcomes(evidence, fitted, 45)
    torch.testing.assert_close(ranked.scores.exp().sum(1), torch.ones(2), rtol=1e-4, atol=1e-4)


def test_anchor_temperature_sharpens_the_bonus_token(random_evidence):
    evidence = random_evidence(4)
    sharp = ClassCalibration(IDENTITY.coefficients, anchor_temperature=0.25)
    assert (
        calibrated_outcomes(evidence, sharp, 1).scores
        > calibrated_outcomes(evidence, IDENTITY, 1).scores
    ).all()


def test_outcomes_below_their_lengths_threshold_are_dropped(random_evidence):
    evidence = random_evidence(5)
    everything = calibrated_outcomes(evidence, IDENTITY, 45)
    thresholds = (0.05, 0.0, 1.0)  # length 0: above 0.05; 1: all; 2 and more: none
    fitted = msgspec.structs.replace(IDENTITY, thresholds=thresholds)
    found = calibrated_outcomes(evidence, fitted, 45)
    assert torch.equal(found.lengths, everything.lengths)
    scores = everything.scores
    kept = (everything.lengths == 0) & (scores >= torch.tensor(0.05).log())
    kept |= (everything.lengths == 1) & scores.isfinite()
    assert torch.equal(found.scores.isfinite(), kept)
    assert kept.any()


def test_impossible_drafts_and_certain_ones_are_finite():
    law = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]])
    evidence = Evidence(torch.tensor([[0, 0]]), torch.tensor([[-0.1, -0.1]]), law)
    for rule in RULES.values():
        ranked = rule(evidence, 4, RuleSettings())
        assert not ranked.scores.isnan().any()


def artefact() -> Calibration:
    return Calibration("target@1", "abc", 16, {"greedy": IDENTITY})


def test_artefact_round_trips_and_is_pinned(tmp_path):
    path = tmp_path / "calibration.json"
    save_calibration(artefact(), path)
    pins = {"target": "target@1", "adapter_sha256": "abc", "block_size": 16}
    assert load_calibration(path, **pins) == artefact()
    assert artefact().of(greedy=True) == IDENTITY
    with pytest.raises(CalibrationError, match="needs 'sampled'"):
        artefact().of(greedy=False)
    for name, value in {"target": "other", "adapter_sha256": "x", "block_size": 8}.items():
        with pytest.raises(CalibrationError, match=f"{name} is"):
            load_calibration(path, **{**pins, name: value})


@pytest.mark.parametrize("damage", ["{", '{"unknown": 1}'])
def test_damaged_artefacts_are_refused(tmp_path, damage):
    path = tmp_path / "calibration.json"
    path.write_text(damage)
    with pytest.raises(CalibrationError, match="run `jetspec calibrate` again"):
        load_calibration(path, target="t", adapter_sha256="a", block_size=16)
