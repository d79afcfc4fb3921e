"""Intervals of acceptance lengths against what a bootstrap must do."""

import math
import random

import pytest

from sglang_jetspec.tools.intervals import mean_interval


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
