"""`jetspec trace`: where the time of a few decoding rounds goes, as a timeline.

Starts a real server with a plug-in that notes when each stage of a round begins and ends, and
writes `trace.json` (for Perfetto or chrome://tracing) and `trace.png`. On a GPU host spans tell
when work was launched, and the lanes named "device" when it ran.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_jetspec.tools.bench.arms import parse_arms
from sglang_jetspec.tools.bench.config import TraceConfig
from sglang_jetspec.tools.bench.round_cost import PROBE, run
from sglang_jetspec.tools.bench.server import Server, ServerError
from sglang_jetspec.tools.bench.timeline import Span, draw, in_order
from sglang_jetspec.tools.model_pair import resolve_pair

WARM_UP_TOKENS = 64
WRITING_S = 30.0  # longest wait for the file once the rounds are over


def trace(config: TraceConfig) -> dict[str, Any]:
    """Record, draw and summarise; raises ValueError for an arm without rounds, ServerError."""
    (arm, *others) = parse_arms(config.arm)
    if arm.kind != "jetspec" or others:
        raise ValueError(f"--arm is {config.arm!r}; give one jetspec arm")
    target, head = resolve_pair(config.target, config.head)
    config.out.mkdir(parents=True, exist_ok=True)
    path = (config.out / "trace.json").resolve()
    start = Path(f"{path}.start")
    for stale in (path, start):
        stale.unlink(missing_ok=True)
    args = ["--model-path", target, "--dtype", config.dtype]
    args += ["--max-running-requests", str(config.batch), *shlex.split(config.server_args)]
    python_path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
    env = {
        **arm.env,
        "PYTHONPATH": python_path,
        "JETSPEC_TRACE": str(path),
        "JETSPEC_TRACE_ROUNDS": str(config.rounds),
    }
    # Every round commits one token at least.
    tokens = WARM_UP_TOKENS + 64 * config.rounds
    with Server([*args, *arm.server_args(head)], env, log=config.out / "server.log") as server:
        run(server, config.batch, WARM_UP_TOKENS)
        start.touch()
        run(server, config.batch, tokens)
        wait_for(path, server)
    start.unlink()
    spans = read_spans(path)
    draw(spans, config.out / "trace.png")
    return {
        "arm": arm.name,
        "trace": str(path),
        "picture": str(config.out / "trace.png"),
        "milliseconds_per_round": milliseconds_per_round(spans, config.rounds),
    }


def wait_for(path: Path, server: Server) -> None:
    """Until the server has written its trace; ServerError when it does not."""
    deadline = time.monotonic() + WRITING_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise ServerError(f"the server wrote no trace{server.log_tail()}")
        time.sleep(0.1)


def read_spans(path: Path) -> list[Span]:
    """The spans of a trace in Chrome's format, times in milliseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    return in_order(
        Span(e["name"], e["pid"], e["tid"], e["ts"] / 1e3, e["dur"] / 1e3) for e in events
    )


def milliseconds_per_round(spans: Sequence[Span], rounds: int) -> dict[str, float]:
    """Host milliseconds of every stage, a round."""
    totals: dict[str, float] = {}
    for span in spans:
        if span.place == "host":
            totals[span.stage] = totals.get(span.stage, 0.0) + span.length
    return {stage: round(total / rounds, 3) for stage, total in totals.items()}


def main(config: TraceConfig) -> None:
    """Trace; the last line on stdout is one JSON object."""
    result = trace(config)
    Console(stderr=True).print(f"{result['picture']}; open {result['trace']} in ui.perfetto.dev")
    json.dump(result, sys.stdout)
    print()
