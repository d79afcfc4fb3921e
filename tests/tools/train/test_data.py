import json

import pytest
from transformers import AutoTokenizer

from sglang_jetspec.tools.train.data import (
    Answer,
    Example,
    Prompt,
    chat_token_ids,
    corpus_examples,
    draft_vocabulary,
    drop_partial_line,
    is_held_out,
    load_examples,
    next_turn,
    read_answers,
    read_jsonl,
    read_prompts,
)


def example(ids, prompt_length):
    return Example("x", "s", ids, prompt_length, finished=True)


@pytest.fixture
def tokenizer(corpus):
    return AutoTokenizer.from_pretrained(corpus / "target")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_are_joined_with_their_prompts(corpus, tokenizer):
    prompts = read_prompts(corpus / "prompts.jsonl")
    examples = load_examples(prompts, corpus / "answers.jsonl", tokenizer, 3072)
    answers = list(read_jsonl(corpus / "answers.jsonl"))
    assert [e.id for e in examples] == [row["id"] for row in answers]
    context = chat_token_ids(tokenizer, prompts[3])
    assert examples[3].token_ids == context + answers[3]["answer_ids"]
    assert examples[3].prompt_length == len(context)
    text = tokenizer.decode(context)
    expected = f"<|im_start|>user\n{prompts[3].turns[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert text == expected


def test_long_conversations_are_cut_and_open_ended(corpus, tokenizer):
    prompts = read_prompts(corpus / "prompts.jsonl")
    whole = load_examples(prompts, corpus / "answers.jsonl", tokenizer, 3072)[0]
    assert whole.finished
    cut = load_examples(prompts, corpus / "answers.jsonl", tokenizer, whole.prompt_length + 5)[0]
    assert cut.token_ids == whole.token_ids[: whole.prompt_length + 5]
    assert not cut.finished


def test_later_turns_see_the_earlier_answers(tmp_path, tokenizer):
    prompts = read_prompts(
        write(
            tmp_path / "p.jsonl", [{"id": "a", "system": "Be kind.", "turns": ["Count.", "More."]}]
        )
    )
    first = tokenizer.encode("One two<|im_end|>", add_special_tokens=False)
    second = tokenizer.encode("Three four", add_special_tokens=False)
    rows = [
        {"id": "a", "turn": 0, "answer_ids": first, "finished": True},
        {"id": "a", "turn": 1, "answer_ids": second, "finished": False},
    ]
    examples = load_examples(prompts, write(tmp_path / "a.jsonl", rows), tokenizer, 3072)
    text = tokenizer.decode(examples[1].token_ids[: examples[1].prompt_length])
    turns = [
        ("system", "Be kind."),
        ("user", "Count."),
        ("assistant", "One two"),
        ("user", "More."),
    ]
    parts = [f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns]
    assert text == "".join(parts) + "<|im_start|>assistant\n"
    assert examples[1].token_ids[examples[1].prompt_length :] == second
    with pytest.raises(ValueError, match="has turn 1 but not turn 0"):
        load_examples(prompts, write(tmp_path / "b.jsonl", rows[1:]), tokenizer, 3072)


def test_the_next_turn_ends_at_cut_answers_and_long_prompts(tokenizer):
    prompt = Prompt("a", ("Count.", "More."))
    turn, ids = next_turn(prompt, {}, tokenizer, 100)
    assert (turn, ids) == (0, chat_token_ids(tokenizer, prompt))
    assert next_turn(prompt, {}, tokenizer, len(ids) - 1) is None
    answer = tokenizer.encode("One two<|im_end|>", add_special_tokens=False)
    turn, ids = next_turn(prompt, {("a", 0): Answer(answer, True)}, tokenizer, 100)
    assert (turn, ids) == (1, chat_token_ids(tokenizer, prompt, ["One two"]))
    assert next_turn(prompt, {("a", 0): Answer(answer, False)}, tokenizer, 100) is None


def test_corpus_replies_are_answers_that_ended(tmp_path, tokenizer):
    rows = [
        {"id": "a", "turns": ["Count.", "More."], "answers": ["One two", "Three"]},
        {"id": "b", "prompt": "Count.", "answer": "One"},
        {"id": "c", "prompt": "Count."},
    ]
    prompts = read_prompts(write(tmp_path / "p.jsonl", rows))
    examples = corpus_examples(prompts, tokenizer, 3072)
    assert [e.id for e in examples] == ["a", "a", "b"]
    assert all(e.finished and e.token_ids[-1] == tokenizer.eos_token_id for e in examples)
    assert tokenizer.decode(examples[1].token_ids).count("One two") == 1
    with pytest.raises(ValueError, match="no prompt has"):
        corpus_examples(prompts[2:], tokenizer, 3072)


def test_only_the_wanted_licences_are_read(tmp_path):
    rows = [
        {"id": "a", "prompt": "x", "license": "CC-BY-NC-4.0"},
        {"id": "b", "prompt": "x", "license": "MIT"},
        {"id": "c", "prompt": "x"},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    assert [p.id for p in read_prompts(path, ("MIT",))] == ["b"]
    assert [p.id for p in read_prompts(path)] == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"no prompt in .* has one of the licences GPL-3\.0"):
        read_prompts(path, ("GPL-3.0",))
    with pytest.raises(ValueError, match=r"no prompt in .*empty\.jsonl$"):
        read_prompts(write(tmp_path / "empty.jsonl", []))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": "b"}, "line 2: needs `id`"),
        ({"prompt": "x"}, "line 2: needs `id`"),
        ({"id": "b", "turns": ["x", 3]}, "line 2: needs `id`"),
        ({"id": "a", "prompt": "x"}, "line 2: id 'a' occurs twice"),
    ],
)
def test_unusable_prompts_are_located(tmp_path, row, message):
    path = write(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x"}, row])
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_partial_line_is_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    drop_partial_line(path)
    path.write_bytes(b'{"id": 1}\n{"id"')
    drop_partial_line(path)
    assert path.read_bytes() == b'{"id": 1}\n'
    drop_partial_line(path)
    assert path.read_bytes() == b'{"id": 1}\n'


def test_broken_line_is_located(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n{"id"\n')
    with pytest.raises(ValueError, match="line 2"):
        list(read_jsonl(path))
    path.write_text('{"id": 1}\n[1]\n')
    with pytest.raises(ValueError, match=r"line 2: \[1\] is no object"):
        list(read_jsonl(path))


def test_answers_that_lack_a_key_are_located(tmp_path):
    whole = {"id": "a", "answer_ids": [1], "finished": True}
    path = write(tmp_path / "a.jsonl", [whole, {"id": 1}])
    with pytest.raises(ValueError, match="line 2: lacks answer_ids, finished"):
        read_answers(path)


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
