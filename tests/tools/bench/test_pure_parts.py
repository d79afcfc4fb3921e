"""Arms, data files and statistics of the benchmark."""

import json
from pathlib import Path

import pytest

from sglang_jetspec.tools.bench.arms import parse_arms
from sglang_jetspec.tools.bench.config import BenchConfig
from sglang_jetspec.tools.bench.measure import Pass, Sample
from sglang_jetspec.tools.bench.prompts import DataError, data_files, encode, load_rows
from sglang_jetspec.tools.bench.summary import first_difference, summarize

ROW = {"id": "a-0", "task": "a", "turns": ["Why?"], "answer": "42"}


def test_arms_and_their_flags() -> None:
    arms = parse_arms("ar, ar_torch_native,jetspec,jetspec:n=16,w=4,d=7,tree=algorithm1")
    assert [arm.name for arm in arms] == [
        "ar",
        "ar_torch_native",
        "jetspec",
        "jetspec:n=16,w=4,d=7,tree=algorithm1",
    ]
    assert arms[0].server_args("H") == []
    assert arms[1].server_args("H") == ["--attention-backend", "torch_native"]
    draft = ["--speculative-algorithm", "JETSPEC", "--speculative-draft-model-path", "H"]
    assert arms[2].server_args("H") == draft
    shape = "--speculative-num-draft-tokens 16 --speculative-eagle-topk 4 --speculative-num-steps 7"
    assert arms[3].server_args("H") == draft + shape.split()
    assert arms[3].env == {"SGLANG_JETSPEC_TREE": "algorithm1"}
    assert arms[2].env == {}
    [arm] = parse_arms("jetspec:n=16,j=3,r=2,b=4,rule=geometric,executor=thread,core=1")
    assert arm.server_args("H") == [*draft, "--speculative-num-draft-tokens", "16"]
    assert arm.env == {
        "SGLANG_JETSPEC_PASSES": "3",
        "SGLANG_JETSPEC_REFRESHES": "2",
        "SGLANG_JETSPEC_OUTCOMES": "4",
        "SGLANG_JETSPEC_RULE": "geometric",
        "SGLANG_JETSPEC_EXECUTOR": "thread",
        "SGLANG_JETSPEC_FORESIGHT_CORES": "1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one arm"),
        ("ar,eagle", "'eagle' is no arm; use ar, ar_torch_native, jetspec"),
        ("ar:n=4", "only jetspec takes options"),
        ("jetspec:m=4", "'m=4' is no option; use n=, w=, d=, j=, r=, b=, tree="),
        ("jetspec:n", "'n' is no option"),
        ("jetspec:n=many", "n must be a whole number, got 'many'"),
        ("ar,jetspec,ar", "ar is named twice"),
        ("jetspec:n=8,n=16", "'jetspec:n=8,n=16' sets an option twice"),
    ],
)
def test_bad_arms_are_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arms(text)


def test_rows_are_read_in_order_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{**ROW, "id": f"a-{i}", "level": i} for i in range(3)]
    path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    assert [row.id for row in load_rows(path)] == ["a-0", "a-1", "a-2"]
    assert [row.id for row in load_rows(path, limit=2)] == ["a-0", "a-1"]
    assert load_rows(path)[0].answer == "42"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2"),
        ('{"id": "x", "task": "a"}', "line 2.*turns"),
        ('{"id": 5, "task": "a", "turns": ["?"]}', r"line 2.*\$\.id"),
        ('{"id": "x", "task": "a", "turns": []}', "line 2.*non-empty"),
        ('{"id": "x", "task": "a", "turns": [" "]}', "line 2.*non-empty"),
        ('{"id": "x", "task": "a", "turns": "?"}', r"line 2.*\$\.turns"),
        ("\udcff", "line 2"),
    ],
)
def test_bad_rows_are_refused_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{line}\n", errors="surrogateescape")
    with pytest.raises(DataError, match=message):
        load_rows(path)
    assert len(load_rows(path, limit=1)) == 1


def test_empty_files_and_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        data_files([tmp_path / "gone.jsonl"])
    with pytest.raises(DataError, match=r"no \*.jsonl"):
        data_files([tmp_path])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no rows"):
        load_rows(tmp_path / "empty.jsonl")
    assert data_files([tmp_path]) == [tmp_path / "empty.jsonl"]


def test_only_the_first_turn_is_asked_with_thinking_off(tmp_path: Path) -> None:
    class Tokenizer:
        def apply_chat_template(self, conversation, **options):
            assert conversation == [{"role": "user", "content": "Why?"}]
            assert options["enable_thinking"] is False
            return [1, 2]

    (tmp_path / "a.jsonl").write_text(json.dumps({**ROW, "turns": ["Why?", "And?"]}))
    (prompt,) = encode(load_rows(tmp_path / "a.jsonl"), Tokenizer())
    assert (prompt.id, prompt.task, prompt.input_ids) == ("a-0", "a", [1, 2])


@pytest.mark.parametrize("name", ["limit", "max_tokens", "batch", "repeats"])
def test_counts_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is 0"):
        BenchConfig(data=(Path("a"),), **{name: 0})


def test_data_is_needed() -> None:
    with pytest.raises(ValueError, match="--data is missing"):
        BenchConfig(data=())


def make_pass(
    arm: str, repeat: int, task: str, wall_s: float, answers: list[list[int]], rounds: int | None
) -> Pass:
    samples = [
        Sample(arm, repeat, task, f"{task}-{i}", 10, ids, wall_s / 2, wall_s / 4, rounds, "stop")
        for i, ids in enumerate(answers)
    ]
    return Pass(arm, repeat, task, wall_s, samples)


def test_summary_of_two_arms_two_repeats_two_tasks() -> None:
    same, other = [1, 2, 3, 4], [1, 2, 9, 4]
    passes = [
        make_pass("ar", 0, "a", 2.0, [same, same], None),
        make_pass("ar", 0, "b", 2.0, [same, same], None),
        make_pass("jetspec", 0, "a", 1.0, [same, same], 2),
        make_pass("jetspec", 0, "b", 1.0, [same, other], 1),
        make_pass("ar", 1, "a", 4.0, [same, same], None),
        make_pass("ar", 1, "b", 4.0, [same, same], None),
        make_pass("jetspec", 1, "a", 2.0, [same, same], 2),
        make_pass("jetspec", 1, "b", 1.0, [same, other], 1),
    ]
    result = summarize(passes, parse_arms("ar,jetspec"))
    ar, jetspec = result["arms"]["ar"], result["arms"]["jetspec"]
    assert ar["tok_per_s"] == pytest.approx(32 / 12)
    assert jetspec["tok_per_s"] == pytest.approx(32 / 5)
    assert ar["decode_tok_per_s"] == pytest.approx(24 / (2 * (0.5 + 0.5 + 1 + 1)))
    assert ar["acceptance_length"] is None
    assert jetspec["acceptance_length"] == pytest.approx(32 / (4 * 2 + 4 * 1))
    assert result["baseline"] == "ar"
    assert result["speedup"] == pytest.approx({"ar": 1.0, "jetspec": 12 / 5})
    assert result["spread"]["tok_per_s"]["ar"] == pytest.approx([2.0, 4.0])
    assert result["spread"]["speedup"]["jetspec"] == pytest.approx([2.0, 16 / 3 / 2.0])
    assert result["identical"]["jetspec"] == {
        "share": 0.75,
        "first_difference": {"task": "b", "id": "b-1", "position": 2},
    }
    assert result["tasks"]["a"]["identical"]["jetspec"]["first_difference"] is None
    assert result["tasks"]["a"]["speedup"]["jetspec"] == pytest.approx(2.0)
    json.dumps(result)


def test_the_faster_baseline_is_the_one_to_beat() -> None:
    arms = parse_arms("ar_torch_native,ar,jetspec")
    passes = [
        make_pass(arm.name, 0, "a", wall, [[1, 2]], None)
        for arm, wall in zip(arms, (4.0, 2.0, 1.0), strict=True)
    ]
    result = summarize(passes, arms)
    assert result["baseline"] == "ar"
    assert result["speedup"] == pytest.approx({"ar_torch_native": 0.5, "ar": 1.0, "jetspec": 2.0})
    assert "ar" not in result["identical"]


def test_without_a_baseline_there_is_no_speedup() -> None:
    result = summarize([make_pass("jetspec", 0, "a", 1.0, [[1]], 1)], parse_arms("jetspec"))
    assert "speedup" not in result
    assert result["arms"]["jetspec"]["decode_tok_per_s"] is None


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0
