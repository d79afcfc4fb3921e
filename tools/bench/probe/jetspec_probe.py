"""A plug-in that times the stages of a decoding round inside a real server.

Put this folder on the server's PYTHONPATH and name a file in JETSPEC_PROBE: after every 20 calls
of the worker it receives ``{stage: {"calls": n, "seconds": total}}`` as JSON. Stages nest: what a
round spends outside its two forward passes is ``round - draft_forward - target_forward``.
"""

import atexit
import functools
import json
import os
import time
from pathlib import Path

WORKER = "sglang_jetspec.worker.JetSpecWorker."
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."
STAGES = {
    WORKER + "_round": "round",
    WORKER + "_draft": "draft",
    WORKER + "_verify": "verify",
    WORKER + "_accept": "accept",
    WORKER + "_commit": "commit",
    SCHEDULER + "run_batch": "run_batch",
    SCHEDULER + "get_next_batch_to_run": "schedule",
    SCHEDULER + "process_batch_result": "process_result",
    "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation": "plain_step",
}
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

totals: dict[str, list[float]] = {}


def record(stage, seconds):
    entry = totals.setdefault(stage, [0, 0.0])
    entry[0] += 1
    entry[1] += seconds
    if stage == "run_batch" and entry[0] % 20 == 0:
        write()


def write():
    stages = {name: {"calls": n, "seconds": total} for name, (n, total) in totals.items()}
    Path(os.environ["JETSPEC_PROBE"]).write_text(json.dumps(stages))


def timed(stage, original, *args, **kwargs):
    start = time.perf_counter()
    try:
        return original(*args, **kwargs)
    finally:
        record(stage, time.perf_counter() - start)


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
    atexit.register(lambda: totals and write())
