"""Regenerating answers and measuring heads with one real engine on the fixture's target."""

import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_jetspec.heads.format import HeadError
from sglang_jetspec.tools import regenerate as regenerate_module
from sglang_jetspec.tools.acceptance_plot import plot_acceptance
from sglang_jetspec.tools.evaluate import EvaluateConfig, evaluate, lengths, ratios, read_tree
from sglang_jetspec.tools.fixture.target import MASK
from sglang_jetspec.tools.fixture.variants import head_as
from sglang_jetspec.tools.intervals import Interval
from sglang_jetspec.tools.regenerate import regenerate
from sglang_jetspec.tools.train.answers import TargetEngine, engine_arguments
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.data import (
    Prompt,
    chat_token_ids,
    load_examples,
    read_answers,
    read_jsonl,
)
from sglang_jetspec.tools.train.generation import Generation
from sglang_jetspec.tools.train.run import run

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny-qwen3"
TARGET = str(FIXTURE / "target")
GENERATION = Generation(
    max_new_tokens=40, max_prompt_tokens=60, batch_size=4, engine='{"dtype": "float32"}'
)
PROMPTS = [
    Prompt("a", ("Add 10 and 20.",), source="s", license="MIT"),
    Prompt("b", ("Count.",)),
    Prompt("c", ("Tell a story about Nora.", "Add 3 and 4.")),
    Prompt("d", ("Count. " * 100,)),
    *(Prompt(f"e{i}", (f"Add {i} and {2 * i}.",)) for i in range(8)),
]


@pytest.fixture(scope="module")
def shared_engine():
    with TargetEngine(TARGET, GENERATION) as engine:
        yield engine


@pytest.fixture
def starts(shared_engine, monkeypatch):
    """How often an engine is asked for; one of these tests' settings is already there."""
    asked = []

    def start(target, generation):
        asked.append(target)
        return contextlib.nullcontext(shared_engine)

    monkeypatch.setattr(regenerate_module, "TargetEngine", start)
    return asked


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def test_answers_are_the_greedy_text_of_the_target(starts, tokenizer, tmp_path):
    out = tmp_path / "answers.jsonl"
    assert regenerate(TARGET, PROMPTS, out, GENERATION) >= 11
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    answers = read_answers(out)
    assert ("d", 0) not in answers  # too long
    for prompt in PROMPTS[:3]:
        ids = torch.tensor([chat_token_ids(tokenizer, prompt)])
        plain = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        assert answers[prompt.id, 0].ids == plain
        assert answers[prompt.id, 0].finished == (plain[-1] == tokenizer.eos_token_id)
    row = next(row for row in read_jsonl(out) if row["id"] == "a")
    assert (row["source"], row["license"], row["temperature"]) == ("s", "MIT", 0.0)


def test_later_turns_follow_the_earlier_answers(starts, tokenizer, tmp_path):
    out = tmp_path / "answers.jsonl"
    first = tokenizer.encode("Otto.<|im_end|>", add_special_tokens=False)
    row = {"id": "c", "turn": 0, "answer_ids": first, "finished": True}
    out.write_text(json.dumps(row) + "\n")
    assert regenerate(TARGET, [PROMPTS[2]], out, GENERATION) == 1
    answers = read_answers(out)
    assert answers["c", 0].ids == first
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    ids = torch.tensor([chat_token_ids(tokenizer, PROMPTS[2], ["Otto."])])
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    assert answers["c", 1].ids == plain


def test_a_killed_regeneration_goes_on_where_it_stopped(starts, tmp_path):
    out = tmp_path / "answers.jsonl"
    total = regenerate(TARGET, PROMPTS, out, GENERATION)
    whole = read_answers(out)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    assert regenerate(TARGET, PROMPTS, out, GENERATION) == total - 4
    assert read_answers(out) == whole
    assert len(starts) == 2
    assert regenerate(TARGET, PROMPTS, out, GENERATION) == 0
    assert len(starts) == 2  # nothing left to ask: no engine


def test_one_command_from_prompts_to_a_head(starts, tokenizer, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": p.id, "turns": list(p.turns)} for p in PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(
        target=TARGET,
        prompts=prompts,
        out=tmp_path / "run",
        generation=GENERATION,
        target_layer_ids=(0, 2),
        draft_layers=1,
        block_size=4,
        mask_token_id=tokenizer.convert_tokens_to_ids(MASK),
        draft_vocab_size=None,
        steps=2,
        bf16=False,
        device="cpu",
        held_out_share=0.0,
    )
    summary = run(config)
    assert summary["train_examples"] == len(read_answers(tmp_path / "run" / "answers.jsonl"))
    assert (tmp_path / "run" / "head" / "model.safetensors").exists()
    run(config)
    assert len(starts) == 1


def test_evaluate_reports_each_set_and_reuses_its_answers(starts, tmp_path):
    rows = [{"id": str(i), "turns": [f"Task {i}5. Tell a story about Otto."]} for i in range(3)]
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvaluateConfig(
        TARGET,
        (FIXTURE / "head",),
        tmp_path,
        tmp_path / "cache",
        sets=("stories",),
        prompts=2,
        max_new_tokens=60,
        budgets=(8, 32),
        width=4,
        trees=("best_first", 'hybrid:{"alpha": 0.0}'),
    )
    results = evaluate(config)
    head = str(FIXTURE / "head")
    values = lengths(results)[head]["stories"]
    hybrid = 'hybrid:{"alpha": 0.0}'
    trees = ["tree8", "tree32", f"{hybrid}-8", f"{hybrid}-32"]
    assert list(values) == ["chain16", *trees]
    assert 1.0 < values["tree8"].mean <= values["tree32"].mean <= 17.0
    assert values[f"{hybrid}-8"].mean == pytest.approx(values["tree8"].mean, rel=0.1)
    for interval in values.values():
        assert interval.low <= interval.mean <= interval.high
    assert len(list(read_jsonl(tmp_path / "cache" / "stories-2x60.jsonl"))) == 2
    assert evaluate(config) == results
    assert len(starts) == 1
    multiples = ratios(results, head, "chain16")[head]["stories"]
    assert multiples["chain16"] == Interval(1.0, 1.0, 1.0)
    assert multiples["tree32"].mean == pytest.approx(values["tree32"].mean / values["chain16"].mean)
    plot_acceptance(lengths(results), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_regenerated_answers_are_training_examples(starts, tokenizer, tmp_path):
    out = tmp_path / "answers.jsonl"
    regenerate(TARGET, PROMPTS, out, GENERATION)
    examples = load_examples(PROMPTS, out, tokenizer, 3072)
    assert {example.id for example in examples} == {p.id for p in PROMPTS if p.id != "d"}


def test_engine_arguments_are_json_over_the_defaults():
    given = Generation(batch_size=8, engine='{"tp_size": 2, "max_running_requests": 3}')
    arguments = engine_arguments("T", given)
    assert arguments["tp_size"] == 2
    assert arguments["max_running_requests"] == 3
    assert arguments["model_path"] == "T"
    with pytest.raises(ValueError, match=r"--generation.engine is '\[\]'"):
        engine_arguments("T", Generation(engine="[]"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bushy", "tree='bushy'"),
        ("hybrid:{", "options are no JSON object"),
        ("chain", "leave it out"),
        ('hybrid:{"b": 1}', "`b`"),
    ],
)
def test_evaluate_refuses_trees_that_do_not_exist(text, message):
    with pytest.raises(ValueError, match=message):
        read_tree(text)


def test_evaluate_refuses_before_the_target_answers(starts, tmp_path):
    head_as("domino", FIXTURE / "head", tmp_path / "domino", seed=1)
    heads = FIXTURE / "head", tmp_path / "domino"
    config = EvaluateConfig(TARGET, heads, tmp_path, tmp_path / "cache", trees=("algorithm1",))
    with pytest.raises(ValueError, match="a domino head's rows depend on their path"):
        evaluate(config)
    with pytest.raises(HeadError, match="does not exist"):
        evaluate(dataclasses.replace(config, head=(tmp_path / "none",)))
    for against, message in [
        ((tmp_path / "none", "chain16"), "none is not among the heads"),
        ((FIXTURE / "head", "chain7"), r"head 'chain7': its trees are chain16, tree8"),
    ]:
        other = dataclasses.replace(config, trees=("best_first",), against=against)
        with pytest.raises(ValueError, match=message):
            evaluate(other)
    assert not starts
