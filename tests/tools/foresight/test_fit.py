"""The calibration's fit recovers what made the rounds, and its thresholds cover."""

import dataclasses
import json
import math

import msgspec
import pytest
import torch

from sglang_jetspec.foresight.calibration import (
    IDENTITY,
    CalibrationError,
    ClassCalibration,
    Evidence,
    calibrated_outcomes,
    hazards,
    load_calibration,
    tempered_bonus_law,
)
from sglang_jetspec.foresight.folder import CALIBRATION, adapter_sha256, check_manifest
from sglang_jetspec.tools.fixture.target import save_target, train_tokenizer
from sglang_jetspec.tools.foresight import calibrate, evaluate
from sglang_jetspec.tools.foresight.fit import (
    Observed,
    conformal_thresholds,
    fit_class,
    observe,
    outcome_scores,
)
from sglang_jetspec.tools.foresight.rounds import Round

TRUE = ClassCalibration((0.4, 0.7, 0.5, 0.3, -0.2, -0.5), anchor_temperature=1.6)


def simulated(count, drafts=4, vocab=12, seed=0):
    """Rounds whose outcomes follow TRUE, whatever the decoder's law says."""
    generator = torch.Generator().manual_seed(seed)
    law = (2 * torch.randn(count, drafts + 1, vocab, generator=generator)).softmax(-1)
    tokens = law[:, :-1].argmax(-1)
    swap = torch.rand(count, drafts, generator=generator) < 0.3
    tokens = torch.where(swap, torch.randint(vocab, swap.shape, generator=generator), tokens)
    evidence = Evidence(tokens, -2 * torch.rand(count, drafts, generator=generator), law)
    chances = hazards(evidence, TRUE).float()
    accepted = torch.rand(chances.shape, generator=generator) < chances
    lengths = accepted.long().cumprod(1).sum(1)
    bonus = tempered_bonus_law(evidence, TRUE.anchor_temperature)
    at = bonus[torch.arange(count), lengths]
    anchors = torch.multinomial(at, 1, generator=generator).squeeze(1)
    live = torch.ones(count, dtype=torch.bool)
    return Round(lengths, anchors, live, ~live, evidence)


@pytest.fixture(scope="module")
def observed():
    return observe([simulated(12_000, seed=s) for s in range(4)])


def test_fit_recovers_the_coefficients_and_the_temperature(observed):
    fitted = fit_class(observed)
    assert fitted.anchor_temperature == pytest.approx(1.6, abs=0.08)
    # The constant and the depth are nearly collinear over four drafts.
    assert fitted.coefficients[1:5] == pytest.approx(TRUE.coefficients[1:5], abs=0.15)
    assert fitted.coefficients[0] == pytest.approx(0.4, abs=0.25)
    assert fitted.coefficients[5] == pytest.approx(-0.5, abs=0.25)


@pytest.mark.parametrize("epsilon", [0.1, 0.3])
def test_thresholds_cover_new_rounds_of_every_length(observed, epsilon):
    fitted = fit_class(observed, epsilon)
    fresh = simulated(12_000, seed=99)
    scores = outcome_scores(observe([fresh]), fitted.coefficients, fitted.anchor_temperature)
    for k in range(5):
        seen = scores[fresh.lengths == k]
        kept = (seen >= fitted.thresholds[k]).double().mean().item()
        slack = 4 * math.sqrt(epsilon * (1 - epsilon) * (1 / len(seen) + 8 / 24_000 * 5))
        assert 1 - epsilon - slack < kept < 1 - epsilon + slack


def test_scores_of_the_fit_are_those_of_serving(observed):
    played = simulated(40, seed=7)
    scores = outcome_scores(observe([played]), TRUE.coefficients, TRUE.anchor_temperature)
    ranked = calibrated_outcomes(played.evidence, TRUE, 60)
    same = (ranked.lengths == played.lengths[:, None]) & (ranked.anchors == played.anchors[:, None])
    expected = ranked.scores.where(same, 0.0).sum(1).exp()
    torch.testing.assert_close(scores.float(), expected, rtol=5e-3, atol=1e-6)


def test_few_scores_give_no_threshold():
    scores, lengths = torch.arange(1, 9).double() / 10, torch.tensor([0] * 8)
    assert conformal_thresholds(scores, lengths, 1, epsilon=0.1) == (0.0, 0.0)
    assert conformal_thresholds(scores, lengths, 1, epsilon=0.25) == (0.2, 0.0)


def test_too_few_or_one_sided_rounds_are_refused(observed):
    with pytest.raises(CalibrationError, match="too few to calibrate"):
        fit_class(observed.part(torch.arange(20)))
    whole = observed.lengths == observed.features.shape[1]
    with pytest.raises(CalibrationError, match="same fate"):
        fit_class(observed.part(whole.nonzero().squeeze(1)))


def test_finished_requests_are_left_out():
    played = simulated(10)
    live = torch.arange(10) < 3
    assert len(observe([dataclasses.replace(played, live=live)])) == 3


@pytest.fixture(scope="module")
def target(tiny_target, tmp_path_factory):
    """The random target on disk, with a tokenizer whose ids it can embed."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    tokenizer = train_tokenizer(seed=0)
    config = tiny_target.config.to_dict() | {"vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    model = type(tiny_target)(type(tiny_target.config)(**config))
    with torch.no_grad():
        model.lm_head.weight[20:28] *= 4  # the head reads it too, and hits these tokens at times
    save_target(model, tokenizer, folder)
    prompts = folder.parent / "prompts.jsonl"
    rows = [{"id": str(i), "prompt": f"Add {i} and {2 * i}."} for i in range(12)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return folder, prompts


def test_calibrate_and_evaluate_commands(make_folder, target, tmp_path, capsys):
    folder, (model, prompts) = make_folder("random"), target
    common = ["--target", str(model), "--folder", str(folder), "--max-new-tokens", "24"]
    flags = [*common, "--prompts", str(prompts), "--batch-size", "12"]
    calibrate.main([*flags, "--plots", str(tmp_path), "--temperatures", "1.0"])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < summary["sampled"]["brier_calibrated"] <= summary["sampled"]["brier_uncalibrated"]
    assert (tmp_path / "reliability-sampled.png").stat().st_size > 5000
    check_manifest(folder)
    pins = {"target": model.name, "adapter_sha256": adapter_sha256(folder), "block_size": 5}
    found = load_calibration(folder / CALIBRATION, **pins)
    assert set(found.classes) == {"sampled"}
    assert len(found.of(greedy=False).thresholds) == 5

    evaluate.main([*flags, "--temperature", "1.0", "--plans", "J1-R1"])
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["prompts"]
    assert set(results["acceptance_length"]) == {
        f"J1-R1 {kind}" for kind in ("stale", "predicted", "true")
    }
    whole = results["cached"]["4"]
    assert 1 <= whole["miss_acceptance_length"] <= 5
    assert whole["hit_rate"] > 0
    rates = [results["hit_rate"]["uncalibrated"][size][0] for size in ["1", "2", "4", "8", "16"]]
    assert rates == sorted(rates)
    assert 0 < rates[-1] <= 1


def test_observed_halves_are_disjoint_and_whole():
    values = torch.arange(11)
    whole = Observed(values, values, values, values)
    one, other = whole.halves()
    assert sorted([*one.lengths.tolist(), *other.lengths.tolist()]) == list(range(11))


def test_identity_is_a_valid_class():
    assert msgspec.json.decode(msgspec.json.encode(IDENTITY), type=ClassCalibration) == IDENTITY
