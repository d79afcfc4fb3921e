"""JetSpec++ between SGLang and `foresight.serving`: requests, faults, counts."""

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_jetspec.foresight.executors import Done, SerialExecutor
from sglang_jetspec.foresight.meters import Meter
from sglang_jetspec.foresight.serving import Block
from sglang_jetspec.foresight_rounds import ForesightRounds
from sglang_jetspec.verification import Acceptance
from sglang_jetspec.window import Window


class StubForesight:
    """Drafts 10, 11, ... behind every root and foresees its requests' rows."""

    options = SimpleNamespace(outcomes=2)

    def __init__(self):
        self.kept, self.committed, self.asked = [], [], []

    def context(self, requests):
        return []

    def draft(self, requests, context, roots):
        self.asked.append(requests)
        drafts = torch.arange(10, 13).expand(len(roots), -1)
        none = torch.zeros(len(roots), dtype=torch.bool)
        tokens = torch.cat([roots[:, None], drafts], dim=1)
        return Block(tokens, torch.zeros(len(roots), 3), ~none, ~none)

    def foresee(self, requests, context, block, sampling):
        return requests.rows.tolist()

    def keep(self, requests, found):
        self.kept.append(found)

    def commit(self, context, tokens, features, positions, slots):
        self.committed.append((tokens, features, positions, slots))


class FailingExecutor:
    def submit(self, work):
        return Done(fault=torch.OutOfMemoryError("device out of memory"))


def round_of(executor):
    """Plays one round of two requests; returns the foresight and the published totals."""
    published = []
    meter = Meter("cpu", published.append)
    table = torch.arange(1, 201, dtype=torch.int32).view(4, 50)
    options = SimpleNamespace(num_draft_tokens=4)
    rounds = ForesightRounds(StubForesight(), table, None, options, executor, meter)
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 48]),
        seq_lens_cpu=torch.tensor([5, 48]),
        req_pool_indices=torch.tensor([2, 0]),
        sampling_info=SimpleNamespace(
            temperatures=torch.ones(2, 1),
            top_ks=torch.ones(2, dtype=torch.int32),
            top_ps=torch.ones(2),
            min_ps=torch.zeros(2),
            need_min_p_sampling=False,
            is_all_greedy=True,
        ),
    )
    window = Window.open(table, batch.req_pool_indices, batch.seq_lens, 4, 50)
    tree, done = rounds.propose(batch, torch.tensor([7, 8]), window)
    acceptance = Acceptance(
        tokens=torch.tensor([[10, 11, 30, 0], [31, 0, 0, 0]]),
        lengths=torch.tensor([3, 1]),
        path=torch.tensor([[0, 1, 2, -1], [0, -1, -1, -1]]),
    )
    features = torch.arange(8.0).view(8, 1)
    rounds.commit(done, tree, acceptance, features, window)
    return rounds, tree, published


def test_a_round_commits_what_was_accepted_and_keeps_what_was_foreseen():
    rounds, tree, _ = round_of(SerialExecutor())
    assert tree.tokens.tolist() == [[7, 10, 11, 12], [8, 10, 0, 0]]  # room for two nodes
    assert tree.parents[0].tolist() == [-1, 0, 1, 2]
    foresight = rounds.foresight
    assert foresight.kept == [[2, 0]]
    [(tokens, features, positions, slots)] = foresight.committed
    assert tokens[0, :3].tolist() == [7, 10, 11]
    assert features[0, :3].flatten().tolist() == [0, 1, 2]
    assert features[1, 0] == 4
    assert positions[0].tolist() == [5, 6, 7, 8]
    assert slots.tolist() == [[106, 107, 108, 0], [49, 0, 0, 0]]
    [asked] = foresight.asked
    assert asked.slots.shape == (2, 50)
    assert asked.slots[0, :5].tolist() == [101, 102, 103, 104, 105]
    totals = rounds.meter.totals
    assert totals.faults == 0
    assert 0 < totals.ahead_seconds < totals.exposed_seconds < totals.round_seconds


def test_lost_work_is_counted_and_told_once(caplog):
    with caplog.at_level(logging.WARNING):
        rounds, tree, _ = round_of(FailingExecutor())
        assert tree.tokens[0].tolist() == [7, 10, 11, 12]
        assert rounds.foresight.kept == []
        assert len(rounds.foresight.committed) == 1
        assert rounds.meter.totals.faults == 1
        assert "device out of memory" in caplog.text
        rounds._lost(RuntimeError("again"))
    assert rounds.meter.totals.faults == 2
    assert "again" not in caplog.text


def test_hits_are_counted(monkeypatch):
    rounds, _, published = round_of(SerialExecutor())
    rounds.meter.flush()
    rounds.meter.flush()
    assert (published[1].waited, published[1].hits) == (2, 2)


@pytest.mark.parametrize("outcomes", [0, 2])
def test_nothing_is_submitted_without_outcomes(monkeypatch, outcomes):
    monkeypatch.setattr(StubForesight, "options", SimpleNamespace(outcomes=outcomes))
    rounds, _, _ = round_of(SerialExecutor())
    assert len(rounds.foresight.kept) == (outcomes > 0)
