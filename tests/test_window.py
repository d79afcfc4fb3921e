"""Slots, positions and commits of one round."""

import torch

from sglang_jetspec.verification import Acceptance
from sglang_jetspec.window import Commit, Window, usable_nodes

TABLE = torch.arange(100, 160, dtype=torch.int32).view(3, 20)


def window(prefix, nodes=4, context=16):
    return Window.open(TABLE, torch.tensor([2, 0]), torch.tensor(prefix), nodes, context)


def test_slots_follow_the_committed_prefix():
    opened = window([3, 5])
    assert opened.slots.tolist() == [[143, 144, 145, 146], [105, 106, 107, 108]]
    assert usable_nodes(opened.prefix_lens, 4, 16).tolist() == [4, 4]
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3]])
    assert opened.positions(depths).tolist() == [[3, 4, 4, 5], [5, 6, 7, 8]]


def test_near_the_context_limit_slots_and_positions_stay_inside():
    opened = window([14, 18])
    assert usable_nodes(opened.prefix_lens, 4, 16).tolist() == [2, 1]
    assert opened.slots.tolist() == [[154, 155, 0, 0], [118, 0, 0, 0]]
    assert opened.positions(torch.arange(4)).tolist() == [[14, 15, 15, 15], [15] * 4]


def test_commit_lists_accepted_rows_and_what_must_move():
    path = torch.tensor([[0, 2, 3], [0, -1, -1]])
    accepted = Acceptance(path, torch.tensor([3, 1]), torch.zeros(2, 3, dtype=torch.int64))
    commit = Commit.of(window([3, 5]), accepted, compact=True)
    assert commit.rows.tolist() == [0, 2, 3, 4]
    assert commit.positions.tolist() == [3, 4, 5, 5]
    assert commit.source.tolist() == [143, 145, 146, 105]
    assert commit.slots.tolist() == [143, 144, 145, 105]
    moved = commit.moved()
    assert moved.source.tolist() == [145, 146]
    assert moved.slots.tolist() == [144, 145]


def test_fixed_shape_commit_pads_with_slot_zero():
    path = torch.tensor([[0, 2, 3], [0, -1, -1]])
    accepted = Acceptance(path, torch.tensor([3, 1]), torch.zeros(2, 3, dtype=torch.int64))
    commit = Commit.of(window([3, 5]), accepted, compact=False)
    assert commit.source.tolist() == [143, 145, 146, 105, 0, 0]
    assert commit.slots.tolist() == [143, 144, 145, 105, 0, 0]
    assert commit.rows[:4].tolist() == [0, 2, 3, 4]
