import json
import random

import pytest
import torch
from accelerate import Accelerator

from sglang_jetspec.tools.fixture.conversations import conversation
from sglang_jetspec.tools.fixture.target import MASK, build_target, save_target, train_tokenizer
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.data import Example
from sglang_jetspec.tools.train.features import FeatureStore

EXAMPLES = 12


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Folder with an untrained tiny target, prompts and made-up answers."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = train_tokenizer(seed=0)
    save_target(build_target(tokenizer, seed=0), tokenizer, folder / "target")
    rng = random.Random(0)
    prompts, answers = [], []
    for i in range(EXAMPLES):
        question, answer = conversation(rng)
        ids = tokenizer.encode(answer * 2, add_special_tokens=False)[:40]
        prompts.append({"id": f"task-{i}", "prompt": question, "answer": answer, "license": "MIT"})
        answers.append(
            {
                "id": f"task-{i}",
                "source": "made-up",
                "license": "MIT",
                "finished": i % 2 == 0,
                "answer_ids": ids,
            }
        )
    for name, rows in (("prompts", prompts), ("answers", answers)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (folder / "mask").write_text(str(tokenizer.convert_tokens_to_ids(MASK)))
    return folder


@pytest.fixture(scope="session")
def accelerator():
    return Accelerator(cpu=True, mixed_precision="no")


@pytest.fixture
def train_config(corpus, tmp_path):
    """A run of a few seconds over the corpus."""

    def make(**changes):
        defaults = {
            "target": str(corpus / "target"),
            "prompts": corpus / "prompts.jsonl",
            "answers": corpus / "answers.jsonl",
            "out": tmp_path / "run",
            "target_layer_ids": (0, 2),
            "draft_layers": 1,
            "block_size": 5,
            "device": "cpu",
            "mask_token_id": int((corpus / "mask").read_text()),
            "draft_vocab_size": 64,
            "steps": 6,
            "sequences_per_step": 2,
            "anchors_per_sequence": 3,
            "learning_rate": 1e-3,
            "held_out_share": 0.25,
            "bf16": False,
            "evaluate_every": 4,
            "evaluate_examples": 2,
            "evaluate_budget": 6,
            "evaluate_width": 2,
            "log_every": 2,
        }
        return TrainConfig(**{**defaults, **changes})

    return make


@pytest.fixture
def counting_store(tmp_path):
    """Three examples whose features are their own row numbers (one column each)."""
    examples = [
        Example("a", "s", list(range(10)), 4, finished=True),
        Example("b", "s", list(range(20, 32)), 2, finished=False),
        Example("c", "s", list(range(40, 47)), 5, finished=True),
    ]
    rows = sum(len(example.token_ids) for example in examples)
    numbers = torch.arange(rows, dtype=torch.bfloat16)
    for name in ("taps", "finals"):
        numbers.view(torch.uint8).numpy().tofile(tmp_path / f"{name}.bin")
    return FeatureStore(tmp_path, examples, tap_width=1, hidden_size=1)
