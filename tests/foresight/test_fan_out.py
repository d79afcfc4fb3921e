"""SSD's geometric fan-out: the figures of appendix F.2 and exhaustive searches."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jetspec.foresight.fan_out import (
    best_series,
    integer_fan_out,
    length_law,
    series_on,
)


def test_figures_of_the_paper():
    law = length_law(0.6, 4)
    assert sum(law) == pytest.approx(1.0)
    everywhere = series_on(law, 10, 1.0, range(5))
    assert everywhere.hit == pytest.approx(0.535, abs=5e-4)
    best = best_series(law, 10, 1.0)
    assert best.hit == pytest.approx(0.567, abs=5e-4)
    assert [k for k, tokens in enumerate(best.fan_out) if tokens] == [0, 1, 2, 4]
    assert sum(best.fan_out) == pytest.approx(10)


@settings(deadline=None)
@given(
    st.floats(0.05, 0.95), st.integers(1, 5), st.integers(1, 24), st.sampled_from([0.5, 1.0, 2.0])
)
def test_no_set_of_lengths_beats_the_best_series(alpha, drafts, budget, rho):
    law = length_law(alpha, drafts)
    found = best_series(law, budget, rho).hit
    for size in range(1, len(law) + 1):
        for kept in combinations(range(len(law)), size):
            assert series_on(law, budget, rho, kept).hit <= found + 1e-9


@settings(deadline=None, max_examples=40)
@given(st.floats(0.1, 0.9), st.integers(1, 3), st.integers(1, 7), st.sampled_from([0.5, 1.0]))
def test_whole_numbers_are_the_best_ones(alpha, drafts, budget, rho):
    law = length_law(alpha, drafts)

    def hit(fan_out):
        return sum(p * (1 - f**-rho) for p, f in zip(law, fan_out, strict=True) if f)

    fan_out = integer_fan_out(law, budget, rho)
    assert sum(fan_out) == budget
    every = (f for f in product(range(budget + 1), repeat=len(law)) if sum(f) == budget)
    assert hit(fan_out) == pytest.approx(max(map(hit, every)))
    assert hit(fan_out) <= best_series(law, budget, rho).hit + 1e-9


def test_one_token_goes_to_the_likeliest_length():
    assert integer_fan_out(length_law(0.6, 4), 1, 1.0) == (1, 0, 0, 0, 0)


def test_acceptance_rate_must_be_a_probability():
    with pytest.raises(ValueError, match=r"alpha is 1\.0"):
        length_law(1.0, 4)
