"""Played rounds: exact text whatever is drafted, and exact scores with an exact adapter."""

import pytest
import torch
from scipy.stats import chisquare

from sglang_jetspec.foresight.outcomes import Outcomes, outcome_law
from sglang_jetspec.foresight.refine import RefinePlan
from sglang_jetspec.foresight.selection import RULES
from sglang_jetspec.tools.foresight.evaluate import parse_plan
from sglang_jetspec.tools.foresight.rounds import RoundPlan, Session

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 3, 5], [8]]
TOKENS = 24


@pytest.fixture(scope="module")
def greedy_text(tiny_target):
    """Plain greedy decoding of each prompt."""
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(TOKENS + 1):
            with torch.no_grad():
                logits = tiny_target(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
        texts.append(ids)
    return texts


def decoded(session):
    rounds = list(session.play())
    texts = []
    for row, prompt in enumerate(PROMPTS):
        count = 1 + sum(int(r.lengths[row]) + 1 for r in rounds if r.live[row])
        texts.append(session.history[row, : len(prompt) + min(count, TOKENS)].tolist())
    return rounds, texts


@pytest.mark.parametrize("states", ["true", "predicted", "stale"])
@pytest.mark.parametrize("plan", ["J0", "J1", "J1-R1", "J3-R1", "J3-R3", "J3-R3n"])
def test_greedy_text_is_the_targets_whatever_is_drafted(make_models, greedy_text, plan, states):
    models = make_models()
    session = Session(models, RoundPlan(parse_plan(plan), states), PROMPTS, TOKENS, seed=0)
    _, texts = decoded(session)
    for found, expected in zip(texts, greedy_text, strict=True):
        assert found == expected[: len(found)]
        assert len(found) - len(expected) >= -1


@pytest.mark.parametrize("jetspec", [{"draft_shift": False}, {"token_input": False}])
def test_other_heads_decode_the_same_text(make_models, greedy_text, jetspec):
    models = make_models("absent", **jetspec)
    _, texts = decoded(Session(models, RoundPlan(RefinePlan(2, 0)), PROMPTS, TOKENS, seed=0))
    assert [t[:20] for t in texts] == [t[:20] for t in greedy_text]


def test_an_exact_adapter_drafts_as_if_the_states_were_true(make_models):
    models = make_models("exact")
    for plan in ("J0", "J2-R1", "J4-R4"):
        played = [
            decoded(Session(models, RoundPlan(parse_plan(plan), kind), PROMPTS, TOKENS, seed=0))
            for kind in ("true", "predicted")
        ]
        one, other = ([r.lengths.tolist() for r in rounds] for rounds, _ in played)
        assert one == other


def test_refresh_and_replacement_by_an_exact_decoder_accept_every_draft(make_models):
    """Each refresh fixes at least one more token: g of them leave the target's own block."""
    models = make_models("exact")
    drafts = models.head.block_size - 1
    plan = RoundPlan(RefinePlan(drafts, drafts))
    rounds = list(Session(models, plan, PROMPTS, TOKENS, seed=0).play())
    assert all((r.lengths[r.live] == drafts).all() for r in rounds)


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("outcomes", [1, 4, 8])
def test_cached_blocks_leave_the_greedy_text(make_models, greedy_text, rule, outcomes):
    plan = RoundPlan(parse_plan("J1-R1"), "cached", outcomes=outcomes, rule=rule)
    rounds, texts = decoded(Session(make_models("exact"), plan, PROMPTS, TOKENS, seed=0))
    for found, expected in zip(texts, greedy_text, strict=True):
        assert found == expected[: len(found)]
    assert not rounds[0].cached.any()
    if rule != "geometric":
        assert any((r.cached & r.live).any() for r in rounds[1:])


@torch.no_grad()
@pytest.mark.parametrize("token_input", [False, True])
@pytest.mark.parametrize("plan", ["J0", "J1", "J2-R2"])
def test_a_batch_of_outcomes_drafts_what_each_alone_would(make_models, plan, token_input):
    """Blocks behind every outcome equal those behind the predicted rows of this outcome only."""
    models = make_models("random", token_input=token_input)
    session = Session(models, RoundPlan(RefinePlan(0, 0)), PROMPTS, TOKENS, seed=0)
    foresight, starts, context = models.foresight, session.base[:, None], session._context()
    anchors = session.history.gather(1, starts)
    drafts = session._draft(RefinePlan(0, 0), context).drafts
    block = torch.cat([anchors, drafts], dim=1)
    predicted = foresight.predict(context, block[:, None], starts)
    lengths = torch.tensor([[0, 2, 4]]).expand(3, -1)
    anchors = torch.tensor([[7, 8, 9]]).expand(3, -1)
    outcomes = Outcomes(lengths, anchors, torch.zeros(3, 3))
    refinement = parse_plan(plan)
    initial = foresight.initial(session.history, starts[:, 0], anchors, 4, block, lengths)
    found = foresight.draft_ahead(context, starts, predicted, outcomes, initial, refinement)
    found = found.drafts.view(3, 3, -1)
    for index, (k, a) in enumerate(((0, 7), (2, 8), (4, 9))):
        text = session.history.scatter(1, starts + torch.arange(5), block)
        text = text.scatter(1, starts + k + 1, a)
        anchor, start = torch.full((3, 1), a), starts + k + 1
        alone = foresight.initial(text, start[:, 0], anchor, 4)
        assert torch.equal(initial[:, index], alone[:, 0])
        suffix = foresight.suffix(predicted, starts, torch.full((3, 1), k))
        expected = foresight.draft([*context, suffix], anchor, start, alone, refinement)
        assert torch.equal(found[:, index], expected.drafts)
    assert not torch.equal(found[:, 0], found[:, 2])


def test_exact_scores_are_calibrated_over_rounds(make_models):
    """At temperature 1 the outcome's expected score equals the expected sum of squared scores.

    With P(k, a) the true law of the outcome, E[P(outcome)] = E[sum P^2]: compared over many rounds
    with their standard error.
    """
    models = make_models("exact")
    plan = RoundPlan(RefinePlan(1, 1), "predicted", 1.0, collect_evidence=True)
    differences = []
    for played in Session(models, plan, PROMPTS * 20, 40, seed=3).play():
        law = outcome_law(played.evidence.drafts, played.evidence.law)
        torch.testing.assert_close(law.sum((1, 2)), torch.ones(len(law)), rtol=1e-4, atol=1e-4)
        rows = torch.arange(len(law))
        seen = law[rows, played.lengths, played.anchors]
        differences.append((seen - law.square().sum((1, 2)))[played.live])
    found = torch.cat(differences)
    assert len(found) > 500
    assert found.mean().abs() < 4 * found.std() / len(found) ** 0.5


@pytest.fixture(scope="module")
def third_token_law(tiny_target):
    """[V] exact law at temperature 1 of the third token behind the first prompt."""
    start = torch.tensor([PROMPTS[0]])
    vocab = tiny_target.config.vocab_size
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    ids = torch.cat([start.expand(len(pairs), -1), pairs], dim=1)
    with torch.no_grad():
        law = tiny_target(ids).logits[:, len(PROMPTS[0]) - 1 :].double().softmax(-1)
    rows = torch.arange(len(pairs))
    weights = law[rows, 0, pairs[:, 0]] * law[rows, 1, pairs[:, 1]]
    return weights @ law[:, 2]


@pytest.mark.parametrize(
    ("plan", "states", "rule"),
    [
        ("J0", "true", "calibrated"),
        ("J3-R3", "predicted", "calibrated"),
        *(("J1-R1", "cached", rule) for rule in sorted(RULES)),
    ],
)
def test_sampled_text_has_the_targets_law(make_models, third_token_law, plan, states, rule):
    """Chi-square of the third token over many requests."""
    count = 1000
    outcomes = 2 if states == "cached" else 0
    setup = RoundPlan(parse_plan(plan), states, 1.0, outcomes=outcomes, rule=rule)
    session = Session(make_models(), setup, [PROMPTS[0]] * count, 3, seed=5)
    assert len(list(session.play())) >= 2
    seen = torch.bincount(session.history[:, len(PROMPTS[0]) + 2], minlength=len(third_token_law))
    expected = third_token_law * count
    usual = expected >= 5
    observed = [*seen[usual].tolist(), int(seen[~usual].sum())]
    likely = [*expected[usual].tolist(), float(expected[~usual].sum())]
    assert chisquare(observed, torch.tensor(likely) / sum(likely) * count).pvalue > 0.001


def test_plan_names():
    assert parse_plan("J0") == RefinePlan(0, 0)
    assert parse_plan("J3-R2n") == RefinePlan(3, 2, replace=False)
    with pytest.raises(ValueError, match="write Jn-Rm"):
        parse_plan("three")
