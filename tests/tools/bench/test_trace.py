"""The timeline of rounds: of a real server on the fixture, and of spans written by hand."""

import itertools
import json
from pathlib import Path

import pytest

from sglang_jetspec.tools.bench.config import TraceConfig
from sglang_jetspec.tools.bench.timeline import Span, draw, in_order
from sglang_jetspec.tools.bench.trace import milliseconds_per_round, read_spans, trace

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-qwen3"
ROUNDS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The spans of a server that drafts ahead in a thread, and what was reported of them."""
    out = tmp_path_factory.mktemp("trace")
    config = TraceConfig(
        out,
        arm="jetspec:n=16,b=2,executor=thread",
        target=str(FIXTURE / "target"),
        head=str(FIXTURE / "jetspecpp"),
        rounds=ROUNDS,
        dtype="float32",
    )
    return trace(config), read_spans(out / "trace.json")


def of_stage(spans, stage):
    return [span for span in spans if span.stage == stage]


def test_every_round_is_there_once(recorded):
    result, spans = recorded
    rounds = of_stage(spans, "round")
    assert len(rounds) == ROUNDS
    for before, after in itertools.pairwise(rounds):
        assert before.start + before.length <= after.start
    for stage in ("propose", "verify", "accept", "commit", "join"):
        found = of_stage(spans, stage)
        assert len(found) == ROUNDS
        for inner, outer in zip(found, rounds, strict=True):
            assert outer.start <= inner.start
            assert inner.start + inner.length <= outer.start + outer.length
    assert set(result["milliseconds_per_round"]) == {span.stage for span in spans}
    assert Path(result["picture"]).read_bytes().startswith(b"\x89PNG")


def test_work_ahead_runs_beside_verification(recorded):
    _, spans = recorded
    ahead, verified = of_stage(spans, "foresee"), of_stage(spans, "verify")
    assert {span.lane for span in ahead} != {span.lane for span in verified}
    assert len({span.lane for span in ahead}) == 1
    for work, verify in zip(ahead, verified, strict=True):
        assert work.start < verify.start + verify.length
        assert verify.start < work.start + work.length


def test_sums_count_host_spans_only(tmp_path):
    spans = [Span("verify", "host", "a", 0.0, 4.0), Span("verify", "host", "a", 8.0, 2.0)]
    assert milliseconds_per_round([*spans, Span("verify", "device", "1", 0.0, 9.0)], 2) == {
        "verify": 3.0
    }
    draw([*spans, Span("verify", "device", "1", 0.0, 9.0)], tmp_path / "lanes.svg")
    picture = (tmp_path / "lanes.svg").read_text()
    assert "<svg" in picture


def test_enclosing_spans_come_first(tmp_path):
    inner, outer = Span("verify", "host", "a", 1.0, 1.0), Span("round", "host", "a", 1.0, 5.0)
    assert in_order([inner, outer]) == [outer, inner]
    event = {"name": "round", "ph": "X", "pid": "host", "tid": "a", "ts": 1000.0, "dur": 5000.0}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [event]}))
    assert read_spans(tmp_path / "t.json") == [outer]


def test_what_cannot_be_traced_is_refused(tmp_path):
    with pytest.raises(ValueError, match="give one jetspec arm"):
        trace(TraceConfig(tmp_path, arm="ar"))
    with pytest.raises(ValueError, match="give one jetspec arm"):
        trace(TraceConfig(tmp_path, arm="jetspec,jetspec:n=4"))
    with pytest.raises(ValueError, match="--rounds is 0"):
        TraceConfig(tmp_path, rounds=0)
