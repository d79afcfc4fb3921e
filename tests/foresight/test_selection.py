"""Selection rules: what each scores by, and the guarantee of the per-round rule."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jetspec.foresight.calibration import IDENTITY, Evidence
from sglang_jetspec.foresight.fan_out import integer_fan_out, length_law
from sglang_jetspec.foresight.outcomes import outcome_law
from sglang_jetspec.foresight.selection import RULES, RuleSettings

rare = msgspec.structs.replace(IDENTITY, acceptance_rate=0.6)


def captured(evidence, outcomes):
    """Probability under the true law that the round ends in a selected outcome."""
    whole = outcome_law(evidence.drafts, evidence.law)
    rows = torch.arange(len(whole))[:, None]
    chances = whole[rows, outcomes.lengths, outcomes.anchors]
    return chances.where(outcomes.scores.isfinite(), 0.0).sum(1)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12), st.sampled_from(sorted(RULES)))
def test_no_rule_beats_the_decoder_score_when_the_decoder_is_perfect(
    random_evidence, seed, count, name
):
    """Appendix F.2: per-round selection by P(k, a) has the largest hit probability."""
    evidence = random_evidence(seed)
    best = captured(evidence, RULES["uncalibrated"](evidence, count, RuleSettings()))
    other = captured(evidence, RULES[name](evidence, count, RuleSettings()))
    assert (other <= best + 1e-6).all()


@pytest.mark.parametrize("name", sorted(RULES))
def test_selected_outcomes_are_distinct_and_possible(random_evidence, name):
    evidence = random_evidence(1, drafts=3)
    outcomes = RULES[name](evidence, 8, RuleSettings(rare))
    for row in range(2):
        live = outcomes.scores[row].isfinite()
        pairs = list(
            zip(
                outcomes.lengths[row][live].tolist(),
                outcomes.anchors[row][live].tolist(),
                strict=True,
            )
        )
        assert len(pairs) == len(set(pairs)) <= 8
        for k, a in pairs:
            assert k == 3 or a != evidence.drafts[row, k].item()


def test_geometric_gives_each_length_its_fixed_number_of_tokens(random_evidence):
    evidence = random_evidence(2, batch=3, drafts=4, vocab=20)
    outcomes = RULES["geometric"](evidence, 10, RuleSettings(rare, rho=1.0))
    fan_out = integer_fan_out(length_law(0.6, 4), 10, 1.0)
    assert fan_out[3] == 0
    for row in range(3):
        live = outcomes.lengths[row][outcomes.scores[row].isfinite()]
        assert torch.bincount(live, minlength=5).tolist() == list(fan_out)


def test_draft_score_follows_the_head_and_not_the_decoder(random_evidence):
    base = random_evidence(6, batch=1)
    sure = Evidence(base.drafts, torch.full((1, 4), -1e-4), base.law)
    unsure = Evidence(base.drafts, torch.full((1, 4), -9.0), base.law)
    rule = RULES["draft_score"]
    assert rule(sure, 1, RuleSettings()).lengths.item() == 4
    assert rule(unsure, 1, RuleSettings()).lengths.item() == 0
