"""Counts of rounds, read one reading late."""

import torch

from sglang_jetspec.foresight.meters import EVERY, Meter


def t(*values):
    return torch.tensor(values, dtype=torch.bool)


def test_counts_come_one_reading_late_and_times_at_once():
    published = []
    meter = Meter("cpu", published.append)
    for _ in range(EVERY):
        meter.count(t(1, 1, 0), t(1, 0, 0))
        meter.totals.exposed_seconds += 0.5
        meter.end()
    assert [(p.waited, p.hits, p.exposed_seconds) for p in published] == [(0, 0, EVERY / 2)]
    for _ in range(EVERY):
        meter.totals.faults += 1
        meter.end()
    meter.flush()
    assert [(p.waited, p.hits, p.faults) for p in published[1:]] == [
        (2 * EVERY, EVERY, EVERY),
        (0, 0, 0),
    ]
