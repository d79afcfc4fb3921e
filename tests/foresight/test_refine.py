"""Jacobi passes, context refresh and anchor replacement on exact toy models."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jetspec.foresight.noise import noise_tokens, training_noise
from sglang_jetspec.foresight.refine import RefinePlan, refine

VOCAB = 23


def successor(token: torch.Tensor) -> torch.Tensor:
    """The toy target: every token has one successor."""
    return (5 * token + 3) % VOCAB


def truth(anchors: torch.Tensor, count: int) -> torch.Tensor:
    tokens = [anchors]
    for _ in range(count):
        tokens.append(successor(tokens[-1]))
    return torch.stack(tokens[1:], 1)


class Toy:
    """A drafter that predicts each successor from its input row, and errs after `bad` tokens.

    With refreshed states it knows the successor of every frozen token but the anchor.
    """

    def __init__(self, bad: set[int] = frozenset()):
        self.bad = bad
        self.blocks, self.frozen, self.states = [], [], []

    def draft(self, block, frozen, states):
        self.blocks.append(block)
        self.frozen.append(frozen)
        self.states.append(states)
        wrong = torch.tensor([[t in self.bad for t in row] for row in block[:, :-1].tolist()])
        guesses = torch.where(
            wrong, (successor(block[:, :-1]) + 1) % VOCAB, successor(block[:, :-1])
        )
        return guesses, torch.full(guesses.shape, -0.5)

    def refresh(self, block):
        return block.clone(), successor(block)


def accepted(drafts, anchors):
    """Drafts the toy target accepts."""
    return (drafts == truth(anchors, drafts.shape[1])).long().cumprod(1).sum(1)


ANCHORS = torch.tensor([0, 7, 11])
NOISE = torch.tensor([[9, 9, 9, 9, 9]] * 3)


def test_each_jacobi_pass_extends_the_correct_prefix_to_the_fixed_point():
    for passes in range(5):
        found = refine(ANCHORS, NOISE, RefinePlan(passes, 0), Toy().draft)
        assert (accepted(found.drafts, ANCHORS) >= min(passes + 1, 5)).all()
    assert torch.equal(found.drafts, truth(ANCHORS, 5))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6))
def test_fixed_point_does_not_depend_on_the_noise(start):
    anchors, noise = torch.tensor(start[:1]), torch.tensor([start[1:]])
    found = refine(anchors, noise, RefinePlan(5, 0), Toy().draft)
    assert torch.equal(found.drafts, truth(anchors, 5))


def test_a_fixed_point_stops_early_and_fixed_length_runs_agree():
    toy = Toy()
    found = refine(ANCHORS, NOISE, RefinePlan(30, 0), toy.draft)
    assert found.passes == len(toy.blocks) <= 7
    again = refine(ANCHORS, NOISE, RefinePlan(30, 0), Toy().draft, early_stop=False)
    assert again.passes == 31
    assert torch.equal(again.drafts, found.drafts)


def test_anchor_replacement_repairs_one_error_a_refresh():
    """The drafter errs after 3 and after 18: jacobi alone never gets past the first error."""
    anchors = torch.tensor([0])
    assert truth(anchors, 5).tolist() == [[3, 18, 1, 8, 20]]
    noise = torch.tensor([[9, 9, 9, 9, 9]])
    bad = {3, 18}
    alone = refine(anchors, noise, RefinePlan(5, 0), Toy(bad).draft)
    assert accepted(alone.drafts, anchors).tolist() == [1]
    lengths, frozen = [], []
    for refreshes in range(5):
        toy = Toy(bad)
        found = refine(anchors, noise, RefinePlan(5, refreshes), toy.draft, toy.refresh)
        lengths += accepted(found.drafts, anchors).tolist()
        frozen += found.frozen.tolist()
    assert lengths == [1, 2, 5, 5, 5]
    assert frozen == [0, 2, 3, 5, 5]


def test_refresh_alone_freezes_what_the_decoder_agrees_with():
    anchors, noise = torch.tensor([0]), torch.tensor([[9, 9, 9, 9, 9]])
    toy = Toy({3})
    plan = RefinePlan(3, 3, replace=False)
    found = refine(anchors, noise, plan, toy.draft, toy.refresh)
    assert accepted(found.drafts, anchors).tolist() == [1]
    assert [f.tolist() for f in toy.frozen] == [[0], [1], [1], [1]][: len(toy.frozen)]


def test_frozen_tokens_never_change_again():
    toy = Toy({3, 1, 8})
    refine(torch.tensor([0, 3]), NOISE[:2], RefinePlan(4, 4), toy.draft, toy.refresh)
    for before, after, frozen in zip(toy.blocks[1:], toy.blocks[2:], toy.frozen[1:], strict=False):
        for row, count in enumerate(frozen.tolist()):
            assert torch.equal(before[row, : count + 1], after[row, : count + 1])
    for earlier, later in zip(toy.frozen, toy.frozen[1:], strict=False):
        assert (later >= earlier).all()


def test_agreement_everywhere_stops_without_another_pass():
    toy = Toy()
    initial = truth(ANCHORS, 5)
    found = refine(ANCHORS, initial, RefinePlan(3, 3), toy.draft, toy.refresh)
    assert found.passes == len(toy.blocks) == 1
    assert torch.equal(found.drafts, initial)


def test_states_of_the_last_refresh_reach_later_passes():
    toy = Toy({3})
    refine(torch.tensor([0]), NOISE[:1], RefinePlan(2, 1), toy.draft, toy.refresh, early_stop=False)
    assert toy.states[0] is None
    assert toy.states[1] is toy.states[2] is not None


def test_a_replaced_token_carries_no_draft_probability():
    toy = Toy({0})
    found = refine(torch.tensor([0]), NOISE[:1], RefinePlan(1, 1), toy.draft, toy.refresh)
    assert found.logprobs.tolist() == [[0.0, -0.5, -0.5, -0.5, -0.5]]


def test_more_refreshes_than_passes_are_refused():
    with pytest.raises(ValueError, match=r"R \(refreshes\) is 2, J \(passes\) is 1"):
        RefinePlan(1, 2)
    with pytest.raises(ValueError, match="needs `refresh`"):
        refine(ANCHORS, NOISE, RefinePlan(1, 1), Toy().draft)


def test_noise_comes_from_the_sequence_up_to_its_anchor():
    history = torch.tensor([[1, 2, 3, 99, 99], [7, 99, 99, 99, 99]])
    generator = torch.Generator().manual_seed(0)
    noise = training_noise(history, torch.tensor([3, 1]), 3000, generator)
    counts = torch.bincount(noise[0], minlength=4)
    assert counts[1:4].sum() == 3000
    assert (counts[1:4] > 900).all()
    assert (noise[1] == 7).all()


def test_served_noise_is_drawn_from_the_text_up_to_the_anchor():
    """Uniformly, from the committed tokens, the accepted drafts and the anchor, nothing else."""
    history, starts = torch.arange(100, 120).expand(2, -1), torch.tensor([3, 0])
    anchors = torch.tensor([[50], [51]])
    first = noise_tokens(history, starts, anchors, 3000)
    assert first.shape == (2, 1, 3000)
    assert set(first[0].flatten().tolist()) == {100, 101, 102, 50}
    assert set(first[1].flatten().tolist()) == {51}
    counts = torch.bincount(first[0, 0])[torch.tensor([100, 101, 102, 50])]
    assert (counts - 750).abs().max() < 100
    block, lengths = torch.tensor([[50, 60, 61, 62], [51, 63, 64, 65]]), torch.tensor([[0, 2]] * 2)
    bonus = torch.tensor([[70, 71], [72, 73]])
    ahead = noise_tokens(history, starts, bonus, 3000, block, lengths)
    assert set(ahead[0, 0].tolist()) == {100, 101, 102, 50, 70}
    assert set(ahead[0, 1].tolist()) == {100, 101, 102, 50, 60, 61, 71}
    assert set(ahead[1, 1].tolist()) == {51, 63, 64, 73}


def test_served_noise_does_not_depend_on_neighbours():
    history, starts = torch.randint(1000, (3, 40)), torch.tensor([7, 30, 12])
    anchors = torch.randint(1000, (3, 1))
    whole = noise_tokens(history, starts, anchors, 15)
    for row in range(3):
        part = slice(row, row + 1)
        assert torch.equal(
            whole[part], noise_tokens(history[part], starts[part], anchors[part], 15)
        )
    assert not torch.equal(whole[0], whole[1])
