from dataclasses import replace

import pytest
import torch

from sglang_jetspec.tools.train.acceptance import (
    Candidates,
    TreeShape,
    committed_per_round,
    draft_everywhere,
    mean_lengths,
    rounds_by_answer,
)
from sglang_jetspec.tools.train.export import published_weights
from sglang_jetspec.tools.train.run import TrainingRun
from sglang_jetspec.trees.scored import Entropy

DEPTH, WIDTH = 3, 2
PROMPT, TEXT = 2, [7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18]


def candidates(rank):
    """Drafts whose correct token stands at `rank` (0-based) in every row; None: nowhere."""
    anchors = torch.arange(PROMPT, len(TEXT) - 1)
    tokens = torch.tensor([90, 91]).expand(len(anchors), DEPTH, WIDTH).clone()
    padded = [*TEXT, 99, 99, 99]
    for row, anchor in enumerate(anchors.tolist()):
        for depth in range(DEPTH):
            if rank is not None:
                tokens[row, depth, rank] = padded[anchor + depth + 1]
    logprobs = torch.tensor([0.7, 0.2]).log().expand(len(anchors), DEPTH, WIDTH)
    return Candidates(anchors, tokens, logprobs)


def rounds(rank, nodes, width, finished=True):
    return committed_per_round(candidates(rank), TEXT, finished, TreeShape(nodes, width))


def test_perfect_chain_commits_its_depth_and_the_bonus():
    assert rounds(0, nodes=4, width=1) == [4, 4]


def test_wrong_drafts_commit_the_bonus_only():
    assert rounds(None, nodes=4, width=1) == [1] * 8
    assert rounds(None, nodes=15, width=2) == [1] * 8


def test_second_choice_needs_a_tree():
    assert rounds(1, nodes=4, width=1) == [1] * 8
    assert rounds(1, nodes=15, width=2) == [4, 4]


def test_unfinished_answers_drop_the_cut_round():
    assert rounds(0, nodes=4, width=1, finished=False) == [4]


def test_labels():
    assert [TreeShape(8, 1).label, TreeShape(16, 4).label] == ["chain7", "tree16"]
    assert TreeShape(16, 4, Entropy(), "entropy-").label == "entropy-16"


@pytest.mark.parametrize(("sign", "committed"), [(1, [1] * 8), (-1, [2] * 4)])
def test_other_kinds_of_trees_build_by_their_own_scores(sign, committed):
    """The right token is the first row's second; the rows below are unsure and wrong."""
    entropies = torch.tensor([0.0, 1.0, 1.0]).expand(len(TEXT) - PROMPT - 1, DEPTH)
    found = replace(candidates(1), entropies=entropies)
    shape = TreeShape(3, 2, Entropy(sign=sign), "entropy-")
    assert committed_per_round(found, TEXT, True, shape) == committed


@torch.no_grad()
def test_drafts_use_each_position_once_and_speak_target_ids(train_config, accelerator):
    state = TrainingRun(train_config(), accelerator)
    head, target = state.model.head.eval(), state.model.target
    example, ids = state.examples[0], state.draft_token_ids
    arguments = (target, ids, state.features, 0, 4)
    scaled = draft_everywhere(head, *arguments, scales=state.scales, blocks=7)
    head.load_state_dict(published_weights(head.state_dict(), state.scales))
    drafts = draft_everywhere(head, *arguments, blocks=7)
    torch.testing.assert_close(scaled.logprobs, drafts.logprobs, rtol=1e-3, atol=1e-4)
    positions = list(range(example.prompt_length, len(example.token_ids) - 1))
    assert drafts.anchors.tolist() == positions
    assert drafts.tokens.shape == (len(positions), 4, 4)
    assert set(drafts.tokens.flatten().tolist()) <= set(ids.tolist())
    assert (drafts.logprobs[..., :-1] >= drafts.logprobs[..., 1:]).all()


@torch.no_grad()
def test_acceptance_lengths_average_all_rounds_of_all_answers(train_config, accelerator):
    state = TrainingRun(train_config(), accelerator)
    arguments = (state.model.head, state.model.target, state.draft_token_ids, state.features)
    shapes = (TreeShape(5, 1), TreeShape(6, 2))
    lengths = mean_lengths(rounds_by_answer(*arguments, [0, 3], shapes, state.scales))
    rounds = []
    for index in (0, 3):
        drafts = draft_everywhere(*arguments, index, 2, state.scales)
        example = state.examples[index]
        rounds += committed_per_round(drafts, example.token_ids, example.finished, shapes[1])
    assert lengths["tree6"] == pytest.approx(sum(rounds) / len(rounds))
    assert 1 <= lengths["chain4"] <= 5
