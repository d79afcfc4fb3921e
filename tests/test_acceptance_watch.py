"""A head that drafts nothing right is named once, after enough rounds."""

import logging

import pytest

from sglang_jetspec.acceptance_watch import ROUNDS, AcceptanceWatch


@pytest.mark.parametrize(
    ("accepted", "warnings"),
    [([0, 0, 0, 0], 1), ([0, 0, 0, 1], 0), ([1], 0), ([0] * 19 + [1], 1)],
)
def test_it_warns_once_and_only_below_a_tenth_of_a_draft(caplog, accepted, warnings):
    watch = AcceptanceWatch()
    with caplog.at_level(logging.WARNING):
        for _ in range(ROUNDS // len(accepted) - 1):
            watch.count(accepted)
        assert not caplog.records
        for _ in range(3 * ROUNDS):
            watch.count(accepted)
    assert len(caplog.records) == warnings
    assert all("hardly ever accepted" in record.message for record in caplog.records)


def test_a_head_that_drops_later_is_left_alone(caplog):
    watch = AcceptanceWatch()
    watch.count([1] * ROUNDS)
    with caplog.at_level(logging.WARNING):
        watch.count([0] * 100 * ROUNDS)
    assert not caplog.records
