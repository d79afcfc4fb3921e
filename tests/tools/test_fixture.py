import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from sglang_jetspec.heads.reference import load_reference_head
from sglang_jetspec.tools.fixture.conversations import KINDS, conversation
from sglang_jetspec.tools.train.acceptance import (
    Candidates,
    TreeShape,
    committed_per_round,
    draft_everywhere,
)
from sglang_jetspec.tools.train.data import Example, Prompt, chat_token_ids
from sglang_jetspec.tools.train.features import capture_features
from sglang_jetspec.tools.train.target import freeze

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny-qwen3"
PROMPTS = [
    "Tell a story about Mira the fox.",
    "Task 123. Count 9 numbers from 123 in steps of 5.",
    "Task 47. Reverse the list: piano, glass, cloud.",
    "Write a record for Otto from Riga.",
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Greedy answers of 128 tokens and their features."""
    tokenizer = AutoTokenizer.from_pretrained(FIXTURE / "target")
    model = Qwen3ForCausalLM.from_pretrained(FIXTURE / "target", dtype=torch.float32).eval()
    examples = []
    for text in PROMPTS:
        prompt = chat_token_ids(tokenizer, Prompt("", (text,)))
        (ids,) = model.generate(
            torch.tensor([prompt]), max_new_tokens=128, do_sample=False, eos_token_id=None
        ).tolist()
        examples.append(Example(text, "test", ids, len(prompt), False))
    head, _ = load_reference_head(FIXTURE / "head")
    folder = tmp_path_factory.mktemp("features")
    taps = head.config.target_layer_ids
    return model, capture_features(model, taps, examples, folder)


def acceptance(answers, shape, depth, causal=None):
    model, store = answers
    head, ids = load_reference_head(FIXTURE / "head", causal)
    rounds = []
    for i, example in enumerate(store.examples):
        drafts = draft_everywhere(head, freeze(model, ids), ids, store, i, shape.width)
        drafts = Candidates(drafts.anchors, drafts.tokens[:, :depth], drafts.logprobs[:, :depth])
        rounds += committed_per_round(drafts, example.token_ids, example.finished, shape)
    return sum(rounds) / len(rounds)


def test_fixture_head_drafts_well(answers):
    assert acceptance(answers, TreeShape(16, 4), depth=7) > 2.5


def test_deeper_drafts_of_the_fixture_pay(answers):
    shallow = acceptance(answers, TreeShape(16, 4), depth=7)
    assert acceptance(answers, TreeShape(32, 4), depth=16) > shallow


def test_fixture_head_is_causal(answers):
    shape = TreeShape(16, 4)
    assert acceptance(answers, shape, 7) > 1.2 * acceptance(answers, shape, 7, causal=False)


def test_fixture_text_does_not_repeat(answers):
    _, store = answers
    for example in store.examples:
        ids = example.token_ids[example.prompt_length :]
        windows = {tuple(ids[i : i + 12]) for i in range(len(ids) - 11)}
        assert len(windows) > 0.8 * (len(ids) - 11)


def test_fixture_is_small():
    size = sum(path.stat().st_size for path in FIXTURE.rglob("*") if path.is_file())
    assert size < 5_000_000


def test_conversations_are_seeded_and_of_every_kind():
    def sample(seed):
        rng = random.Random(seed)
        return [conversation(rng) for _ in range(300)]

    first = sample(1)
    assert first == sample(1)
    assert first != sample(2)
    openings = {question.split(". ")[-1].split()[0] for question, _ in first}
    assert openings == {"Tell", "Add", "Write", "Count", "Reverse"}
    assert len(KINDS) == 10
    assert len(set(first)) > 270
