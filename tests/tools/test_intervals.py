"""Intervals of acceptance lengths against what a bootstrap must do."""

import math
import random

import pytest

from sglang_jetspec.tools.intervals import mean_interval, ratio_interval


def answers(count, seed):
    draw = random.Random(seed)
    return [[draw.choice([1, 1, 2, 4])] * 10 for _ in range(count)]


def test_the_mean_counts_rounds_and_not_answers():
    assert mean_interval([[1, 1, 1], [5]]).mean == 2.0


def test_an_answer_is_drawn_as_a_whole():
    """Ten equal rounds an answer say no more than one, so the interval stays as wide."""
    found = mean_interval(answers(40, 0))
    single = mean_interval([answer[:1] for answer in answers(40, 0)])
    assert (found.low, found.high) == (single.low, single.high)
    spread = math.sqrt(1.5)  # of one draw; 95 % is 1.96 standard errors
    assert found.high - found.low == pytest.approx(2 * 1.96 * spread / math.sqrt(40), rel=0.25)


def test_about_95_of_100_intervals_hold_the_true_mean():
    found = [mean_interval(answers(40, seed)) for seed in range(100)]
    assert 88 <= sum(i.low <= 2.0 <= i.high for i in found) <= 100


def test_little_data():
    assert mean_interval([[2, 4]]) == mean_interval([[2, 4], []])
    assert str(mean_interval([[2, 4]])) == "3.00 [3.00, 3.00]"
    assert math.isnan(mean_interval([[], []]).mean)


def test_a_ratio_of_the_same_answers_is_narrower_than_its_parts():
    """Rounds of 3 against 2 in every answer that is hard, 6 against 4 in every easy one."""
    draw = random.Random(0)
    hardness = [draw.choice([1, 2]) for _ in range(40)]
    ours, theirs = [[3 * hard] * 10 for hard in hardness], [[2 * hard] * 10 for hard in hardness]
    found = ratio_interval(ours, theirs)
    assert (found.mean, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert mean_interval(ours).high - mean_interval(ours).low > 0.5


def test_about_95_of_100_ratio_intervals_hold_the_true_ratio():
    found = [ratio_interval(answers(40, seed), answers(40, seed + 1000)) for seed in range(100)]
    assert 88 <= sum(i.low <= 1.0 <= i.high for i in found) <= 100


def test_ratios_want_the_same_answers():
    with pytest.raises(ValueError, match="shorter"):
        ratio_interval([[2], [3]], [[2]])
