import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from sglang_jetspec.tools.train.acceptance import (
    Candidates,
    TreeShape,
    committed_per_round,
    draft_everywhere,
)
from sglang_jetspec.tools.train.answers import Decoding, answer_prompts
from sglang_jetspec.tools.train.export import published_weights
from sglang_jetspec.tools.train.run import TrainingRun

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


@torch.no_grad()
def test_drafts_use_each_position_once_and_speak_target_ids(train_config):
    state = TrainingRun(train_config())
    state.head.load_state_dict(published_weights(state.head.state_dict(), state.scales))
    example = state.store.examples[0]
    drafts = draft_everywhere(
        state.head.eval(), state.target, state.draft_token_ids, state.store, 0, width=4, blocks=7
    )
    positions = list(range(example.prompt_length, len(example.token_ids) - 1))
    assert drafts.anchors.tolist() == positions
    assert drafts.tokens.shape == (len(positions), 4, 4)
    assert set(drafts.tokens.flatten().tolist()) <= set(state.draft_token_ids.tolist())
    assert (drafts.logprobs[..., :-1] >= drafts.logprobs[..., 1:]).all()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_batched_answers_equal_single_ones(corpus, ignore_eos):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "target")
    model = Qwen3ForCausalLM.from_pretrained(corpus / "target", dtype=torch.float32).eval()
    prompts = ["Add 10 and 20.", "Tell a story about Nora the toad, please.", "Count."]
    decoding = Decoding(max_new_tokens=12, ignore_eos=ignore_eos)
    batched = dict(answer_prompts(model, tokenizer, prompts, decoding, batch_size=2))
    single = dict(answer_prompts(model, tokenizer, prompts, decoding, batch_size=1))
    assert batched == single
    assert sorted(batched) == [0, 1, 2]
    for answer in batched.values():
        ended = tokenizer.eos_token_id in answer.ids and not ignore_eos
        assert answer.finished == ended
        assert ended or len(answer.ids) == 12
