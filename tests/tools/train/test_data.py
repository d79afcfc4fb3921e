import json

import pytest
from transformers import AutoTokenizer

from sglang_jetspec.tools.train.data import (
    Example,
    draft_vocabulary,
    is_held_out,
    load_examples,
    prompt_token_ids,
    read_jsonl,
)


def example(ids, prompt_length):
    return Example("x", "s", ids, prompt_length, finished=True)


def test_answers_are_joined_with_their_prompts(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "target")
    examples = load_examples(corpus / "prompts.jsonl", corpus / "answers.jsonl", tokenizer)
    prompts = list(read_jsonl(corpus / "prompts.jsonl"))
    answers = list(read_jsonl(corpus / "answers.jsonl"))
    assert [e.id for e in examples] == [row["id"] for row in answers]
    prompt = prompt_token_ids(tokenizer, prompts[3]["prompt"])
    assert examples[3].token_ids == prompt + answers[3]["answer_ids"]
    assert examples[3].prompt_length == len(prompt)
    text = tokenizer.decode(prompt)
    assert text == f"<|im_start|>user\n{prompts[3]['prompt']}<|im_end|>\n<|im_start|>assistant\n"


def test_other_licences_are_left_out(corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "target")
    rows = list(read_jsonl(corpus / "answers.jsonl"))
    rows[0]["license"] = "CC-BY-NC-4.0"
    answers = tmp_path / "answers.jsonl"
    answers.write_text("\n".join(map(json.dumps, rows)))
    examples = load_examples(corpus / "prompts.jsonl", answers, tokenizer)
    assert [e.id for e in examples] == [row["id"] for row in rows[1:]]
    with pytest.raises(ValueError, match="no answer"):
        load_examples(corpus / "prompts.jsonl", answers, tokenizer, licenses=("GPL-3.0",))


def test_answer_without_prompt_is_an_error(corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "target")
    answers = tmp_path / "answers.jsonl"
    row = next(read_jsonl(corpus / "answers.jsonl")) | {"id": "nowhere"}
    answers.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="'nowhere' has no prompt"):
        load_examples(corpus / "prompts.jsonl", answers, tokenizer)


def test_broken_line_is_located(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id"\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_jsonl(path))


def test_held_out_share_depends_on_the_id_alone():
    ids = [f"task-{i}" for i in range(4000)]
    held = {i for i in ids if is_held_out(i, 0.1)}
    assert 0.08 < len(held) / len(ids) < 0.12
    assert held == {i for i in reversed(ids) if is_held_out(i, 0.1)}
    assert held <= {i for i in ids if is_held_out(i, 0.2)}
    assert not any(is_held_out(i, 0.0) for i in ids)


def test_draft_vocabulary_counts_answers_only_and_is_ascending():
    rows = [example([9, 9, 9, 5, 5, 7], 3), example([8, 5, 7, 3], 1)]
    assert draft_vocabulary(rows, 2) == [5, 7]
    assert draft_vocabulary(rows, 3) == [3, 5, 7]
    assert draft_vocabulary(rows, 2, always=[1]) == [1, 5]
    assert draft_vocabulary(rows, 50) == [3, 5, 7]
