"""A plug-in that times the stages of a decoding round inside a real server.

Put this folder on the server's PYTHONPATH and name a file in JETSPEC_PROBE: after every 20 calls
of the worker it receives ``{stage: {"calls": n, "seconds": total}}`` as JSON. Stages nest: what a
round spends outside its two forward passes is ``round - draft_forward - target_forward``.

With a file named in JETSPEC_TRACE, the rounds after a file of that name plus ".start" appeared are
written to it, JETSPEC_TRACE_ROUNDS of them, in Chrome's trace format: host spans by thread and, on
a GPU, the time between events that the same spans put into their streams.
"""

import atexit
import functools
import json
import os
import threading
import time
from pathlib import Path

WORKER = "sglang_jetspec.worker.JetSpecWorker."
FORESIGHT = "sglang_jetspec.foresight_rounds.ForesightRounds."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
STAGES = {
    WORKER + "_round": "round",
    WORKER + "_draft": "draft",
    WORKER + "_verify": "verify",
    WORKER + "_accept": "accept",
    WORKER + "_commit": "commit",
    FORESIGHT + "propose": "propose",
    FORESIGHT + "_foresee": "foresee",
    FORESIGHT + "_join": "join",
    FORESIGHT + "commit": "adapter",
    SCHEDULER + "run_batch": "run_batch",
    SCHEDULER + "get_next_batch_to_run": "schedule",
    SCHEDULER + "process_batch_result": "process_result",
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": "plain_step",
}
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

totals: dict[str, list[float]] = {}


class Trace:
    """Spans of the rounds after the start file appeared; written once."""

    def __init__(self, path, rounds):
        self.path, self.left = path, rounds
        self.start_file = Path(f"{path}.start")
        self.recording = False
        self.spans = []
        self.origin = None

    def mark(self):
        """Host seconds, and where there is a GPU an event of the current stream."""
        import torch

        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return time.perf_counter(), None, None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return time.perf_counter(), event, torch.cuda.current_stream().cuda_stream

    def begin(self):
        """Asked before every round: whether to keep spans from here on."""
        if not self.recording and self.left and self.start_file.exists():
            self.recording, self.origin = True, self.mark()

    def add(self, stage, start, end):
        self.spans.append((stage, threading.current_thread().name, start, end))
        self.left -= stage == "round"
        if self.left <= 0 and stage == "process_result":
            self.recording = False
            self.write()

    def write(self):
        host = [
            event(stage, "host", thread, start[0] - self.origin[0], end[0] - start[0])
            for stage, thread, start, end in self.spans
        ]
        device = [
            event(
                stage,
                "device",
                f"stream {start[2]}",
                self.origin[1].elapsed_time(start[1]) / 1e3,
                start[1].elapsed_time(end[1]) / 1e3,
            )
            for stage, _, start, end in self.spans
            if start[1] is not None and start[1].query() and end[1].query()
        ]
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"traceEvents": host + device}))
        partial.rename(self.path)


def event(stage, place, lane, start, seconds):
    """One complete event of Chrome's format, in microseconds."""
    return {
        "name": stage,
        "ph": "X",
        "pid": place,
        "tid": lane,
        "ts": 1e6 * start,
        "dur": 1e6 * seconds,
    }


trace = None
if "JETSPEC_TRACE" in os.environ:
    trace = Trace(Path(os.environ["JETSPEC_TRACE"]), int(os.environ["JETSPEC_TRACE_ROUNDS"]))


def record(stage, seconds):
    entry = totals.setdefault(stage, [0, 0.0])
    entry[0] += 1
    entry[1] += seconds
    if stage == "run_batch" and entry[0] % 20 == 0 and "JETSPEC_PROBE" in os.environ:
        write()


def write():
    stages = {name: {"calls": n, "seconds": total} for name, (n, total) in totals.items()}
    Path(os.environ["JETSPEC_PROBE"]).write_text(json.dumps(stages))


def timed(stage, original, *args, **kwargs):
    if trace and stage == "round":
        trace.begin()
    marked = trace and trace.recording
    start = trace.mark() if marked else (time.perf_counter(),)
    try:
        return original(*args, **kwargs)
    finally:
        end = trace.mark() if marked else (time.perf_counter(),)
        record(stage, end[0] - start[0])
        if marked:
            trace.add(stage, start, end)


def timed_forward(original, runner, forward_batch, *args, **kwargs):
    kind = "draft_forward" if runner.is_draft_worker else "target_forward"
    if not forward_batch.forward_mode.is_target_verify():
        kind += "_" + forward_batch.forward_mode.name.lower()
    return timed(kind, original, runner, forward_batch, *args, **kwargs)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, stage in STAGES.items():
        HookRegistry.register(target, functools.partial(timed, stage), HookType.AROUND)
    HookRegistry.register(FORWARD, timed_forward, HookType.AROUND)
    if "JETSPEC_PROBE" in os.environ:
        atexit.register(lambda: totals and write())
