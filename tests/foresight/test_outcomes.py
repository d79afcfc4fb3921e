"""Outcome probabilities against definitions, enumerations and simulated verification."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from sglang_jetspec.foresight.outcomes import (
    Outcomes,
    bonus_law,
    log_length_law,
    outcome_law,
    rank_outcomes,
)
from sglang_jetspec.verification import Sampling
from sglang_jetspec.verification.sampling import draw, sampling_law


def random_law(seed: int, batch: int, drafts: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    law = (2 * torch.randn(batch, drafts + 1, vocab, generator=generator)).softmax(-1)
    return torch.randint(vocab, (batch, drafts), generator=generator), law


def test_example_of_the_paper():
    """p(d1) = 0.8, p(d2 | d1) = 0.5, p(b | d1) = 0.3: P(1, b) = 0.24 (appendix F.1)."""
    first, second, bonus = 0, 1, 2
    law = torch.zeros(1, 3, 4)
    law[0, 0, first], law[0, 0, 3] = 0.8, 0.2
    law[0, 1, second], law[0, 1, bonus], law[0, 1, 3] = 0.5, 0.3, 0.2
    law[0, 2, 3] = 1.0
    found = outcome_law(torch.tensor([[first, second]]), law)
    assert found[0, 1, bonus].item() == pytest.approx(0.24)
    assert found[0, 1, second].item() == 0.0
    assert found[0, 0, 3].item() == pytest.approx(0.2)
    assert found[0, 2, 3].item() == pytest.approx(0.4)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 6))
def test_probabilities_sum_to_one(seed, drafts, vocab):
    tokens, law = random_law(seed, 3, drafts, vocab)
    total = outcome_law(tokens, law).sum((1, 2))
    torch.testing.assert_close(total, torch.ones(3))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 6), st.integers(1, 12))
def test_ranked_outcomes_are_the_largest_of_the_whole_law(seed, drafts, vocab, count):
    tokens, law = random_law(seed, 1, drafts, vocab)
    accept = law[:, :-1].gather(2, tokens.unsqueeze(2)).squeeze(2)
    ranked = rank_outcomes(log_length_law(accept), bonus_law(tokens, law), count)
    whole = outcome_law(tokens, law)[0]
    expected = whole.flatten().sort(descending=True).values[:count]
    live = ranked.scores[0].isfinite()
    torch.testing.assert_close(ranked.scores[0][live].exp(), expected[expected > 0][: live.sum()])
    at = whole[ranked.lengths[0], ranked.anchors[0]]
    torch.testing.assert_close(ranked.scores[0].exp(), at)


def test_certain_drafts_leave_no_bonus_before_the_end():
    law = torch.zeros(1, 2, 3)
    law[0, 0, 1] = 1.0
    law[0, 1] = torch.tensor([0.5, 0.25, 0.25])
    tokens = torch.tensor([[1]])
    accept = torch.ones(1, 1)
    ranked = rank_outcomes(log_length_law(accept), bonus_law(tokens, law), 6)
    assert ranked.scores.exp().tolist()[0] == pytest.approx([0.5, 0.25, 0.25, 0, 0, 0])
    assert ranked.lengths[0, :3].tolist() == [1, 1, 1]


def test_membership_ignores_dropped_candidates():
    outcomes = Outcomes(
        torch.tensor([[2, 0], [1, 1]]),
        torch.tensor([[7, 7], [5, 6]]),
        torch.tensor([[-1.0, float("-inf")], [-1.0, -2.0]]),
    )
    assert outcomes.contains(torch.tensor([2, 1]), torch.tensor([7, 6])).tolist() == [True, True]
    assert outcomes.contains(torch.tensor([0, 1]), torch.tensor([7, 7])).tolist() == [False, False]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 1 << 30, 1.0), (0.7, 4, 1.0), (1.3, 1 << 30, 0.8)]
)
def test_scores_of_a_perfect_decoder_are_outcome_frequencies(temperature, top_k, top_p):
    """Verification draws at every row reached; chi-square against P(k, a) at any temperature."""
    rounds, drafts, vocab = 20_000, 3, 6
    generator = torch.Generator().manual_seed(5)
    logits = 1.5 * torch.randn(drafts + 1, vocab, generator=generator)
    tokens = logits[:-1].argmax(-1)
    sampling = Sampling(
        temperatures=torch.tensor([temperature]),
        top_ks=torch.tensor([top_k]),
        top_ps=torch.tensor([top_p]),
        min_ps=None,
        greedy=torch.tensor([False]),
        all_greedy=False,
    )
    rows = sampling.rows(torch.zeros(rounds * (drafts + 1), dtype=torch.long))
    choices = draw(logits.repeat(rounds, 1), rows, generator).view(rounds, drafts + 1)
    lengths = (choices[:, :-1] == tokens).long().cumprod(1).sum(1)
    anchors = choices.gather(1, lengths[:, None]).squeeze(1)
    counts = torch.bincount(lengths * vocab + anchors, minlength=(drafts + 1) * vocab).double()
    law = sampling_law(logits, sampling.rows(torch.zeros(drafts + 1, dtype=torch.long)))
    expected = outcome_law(tokens[None], law[None]).double().flatten() * rounds
    possible = expected > 0
    assert counts[~possible].sum() == 0
    scaled = expected[possible] * counts.sum() / expected.sum()
    assert chisquare(counts[possible], scaled).pvalue > 0.001
