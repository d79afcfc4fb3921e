import json
from pathlib import Path

import pytest

from sglang_jetspec.tools.evaluate import EvaluateConfig, evaluate
from sglang_jetspec.tools.regenerate import RegenerateConfig, regenerate
from sglang_jetspec.tools.train.data import load_examples, read_jsonl

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny-qwen3"


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "source": "s", "license": "MIT", "prompt": "Add 10 and 20."},
        {"id": "b", "source": "s", "license": "CC-BY-NC-4.0", "prompt": "Add 10 and 21."},
        {"id": "c", "source": "s", "license": "Apache-2.0", "prompt": "Count."},
        {"id": "d", "source": "s", "license": "MIT", "prompt": "Count. " * 100},
    ]
    write_rows(path, rows)
    return path


def test_regenerate_answers_open_short_prompts_once(prompts, tmp_path):
    out = tmp_path / "answers.jsonl"
    config = RegenerateConfig(
        FIXTURE / "target", prompts, out, max_new_tokens=80, max_prompt_tokens=60, limit=1
    )
    assert regenerate(config) == 1
    assert regenerate(config) == 1
    assert regenerate(config) == 0
    rows = list(read_jsonl(out))
    assert [row["id"] for row in rows] == ["a", "c"]
    assert all(row["answer_ids"] and row["temperature"] == 0.0 for row in rows)
    finished = [row for row in rows if row["finished"]]
    assert finished
    assert all(row["answer_ids"].count(2) == 1 for row in finished)


def test_regenerated_answers_are_training_examples(prompts, tmp_path):
    from transformers import AutoTokenizer

    out = tmp_path / "answers.jsonl"
    config = RegenerateConfig(FIXTURE / "target", prompts, out, max_new_tokens=8, temperature=0.7)
    regenerate(config)
    tokenizer = AutoTokenizer.from_pretrained(FIXTURE / "target")
    examples = load_examples(prompts, out, tokenizer)
    assert sorted(example.id for example in examples) == ["a", "c", "d"]


def test_evaluate_reports_each_set_and_reuses_its_answers(tmp_path, monkeypatch):
    write_rows(
        tmp_path / "stories.jsonl",
        [{"id": str(i), "turns": [f"Task {i}5. Tell a story about Otto."]} for i in range(3)],
    )
    config = EvaluateConfig(
        FIXTURE / "target",
        FIXTURE / "head",
        tmp_path,
        tmp_path / "cache",
        sets=("stories",),
        prompts=2,
        max_new_tokens=60,
        budgets=(8, 32),
        width=4,
    )
    results = evaluate(config)
    values = results["stories"]
    assert list(values) == ["chain16", "tree8", "tree32"]
    assert 1.0 < values["tree8"] <= values["tree32"] <= 17.0
    assert len(list(read_jsonl(tmp_path / "cache" / "stories-2x60.jsonl"))) == 2

    def no_more_answers(*_):
        raise AssertionError("answers were not reused")

    monkeypatch.setattr("sglang_jetspec.tools.evaluate.answer_prompts", no_more_answers)
    assert evaluate(config) == results
