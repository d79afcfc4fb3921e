"""The cache of foresight drafts: found by outcome, and only by whom it was made for."""

import torch

from sglang_jetspec.foresight.cache import OutcomeCache
from sglang_jetspec.foresight.outcomes import Outcomes


def t(*values):
    return torch.tensor(values)


LOGPROBS = -torch.arange(12.0).view(2, 3, 2)


def filled() -> OutcomeCache:
    """Slots 1 and 3 of 5, three outcomes each; the third of slot 3 was dropped."""
    cache = OutcomeCache(slots=5, outcomes=3, drafts=2, device="cpu")
    outcomes = Outcomes(
        torch.tensor([[0, 2, 1], [2, 2, 0]]),
        torch.tensor([[10, 11, 12], [20, 21, 22]]),
        torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -2.0, float("-inf")]]),
    )
    blocks = torch.arange(12).view(2, 3, 2)
    cache.put(t(1, 3), bases=t(40, 50), outcomes=outcomes, blocks=blocks, logprobs=LOGPROBS)
    return cache


def test_hit_returns_the_outcomes_block_once():
    cache = filled()
    hit, blocks, logprobs = cache.take(t(3, 1), ends=t(53, 43), anchors=t(21, 11))
    assert hit.tolist() == [True, True]
    assert blocks.tolist() == [[8, 9], [2, 3]]
    assert logprobs.tolist() == [[-8.0, -9.0], [-2.0, -3.0]]
    assert not cache.take(t(3, 1), t(53, 43), t(21, 11))[0].any()


def test_other_outcomes_miss_and_forget():
    """Another accepted length, another bonus token."""
    cache = filled()
    hit, blocks, logprobs = cache.take(t(1, 3), t(41, 53), t(11, 19))
    assert hit.tolist() == [False, False]
    assert blocks.tolist() == [[-1, -1], [-1, -1]]
    assert not logprobs.any()
    assert not cache.take(t(1), t(41), t(10))[0].any()


def test_dropped_outcomes_are_never_found():
    assert not filled().take(t(3), t(51), t(22))[0].any()


def test_a_slot_is_dropped_alone():
    cache = filled()
    cache.drop(t(1))
    assert cache.take(t(1, 3), t(41, 53), t(10, 20))[0].tolist() == [False, True]


def test_empty_slots_miss_whatever_is_asked():
    cache = OutcomeCache(slots=2, outcomes=2, drafts=2, device="cpu")
    assert not cache.take(t(0, 1), t(-1, 5), t(-1, 0))[0].any()


def test_fewer_outcomes_than_before_leave_nothing_behind():
    cache = filled()
    one = Outcomes(t(1).view(1, 1), t(9).view(1, 1), torch.zeros(1, 1))
    cache.put(t(1), t(44), one, torch.tensor([[[7, 8]]]), torch.zeros(1, 1, 2))
    assert not cache.take(t(1), t(47), t(11))[0].any()
