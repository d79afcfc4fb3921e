"""Where a decoding round's time goes, inside a real server.

    python -m sglang_jetspec.tools.bench.round_cost --target T --head H --batches 1 16

Prints one line a stage and, last on stdout, one JSON object. ``host`` is what a round spends
outside its two forward passes; ``scheduler`` is SGLang's own time around the worker.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from sglang_jetspec.tools.bench.server import Server
from sglang_jetspec.tools.model_pair import resolve_pair

PROBE = Path(__file__).parent / "probe"
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3,")
WARM_UP_TOKENS, TOKENS = 64, 256
Stages = dict[str, dict[str, float]]


@dataclass(frozen=True)
class RoundCostConfig:
    """Time the stages of JETSPEC's decoding round."""

    target: str | None = None
    """Target model folder or hub id; the demo target if left out."""
    head: str | None = None
    """Draft head folder or hub id; the demo head if left out."""
    batches: tuple[int, ...] = (1, 16)
    """Requests in flight."""
    dtype: str = "bfloat16"
    server_args: str = ""
    """More flags for the server, as one quoted text."""


def main(config: RoundCostConfig) -> None:
    target, head = resolve_pair(config.target, config.head)
    args = [
        *("--model-path", target, "--dtype", config.dtype, "--context-length", "2048"),
        *("--speculative-algorithm", "JETSPEC", "--speculative-draft-model-path", head),
        *("--max-running-requests", str(max(config.batches)), *shlex.split(config.server_args)),
    ]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "stages.json"
        path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
        env = {"PYTHONPATH": path, "JETSPEC_PROBE": str(report)}
        with Server(args, env) as server:
            for batch in config.batches:
                run(server, batch, WARM_UP_TOKENS)
                before = json.loads(report.read_text())
                run(server, batch, TOKENS)
                results[batch] = per_round(before, json.loads(report.read_text()))
    Console(stderr=True).print(table(results))
    json.dump({"dtype": config.dtype, "milliseconds_per_round": results}, sys.stdout)
    print()


def run(server: Server, batch: int, tokens: int) -> None:
    """Keep ``batch`` requests in flight until each has ``tokens`` tokens."""
    with ThreadPoolExecutor(batch) as pool:
        prompts = [f"{PROMPTS[i % len(PROMPTS)]} {i}" for i in range(batch)]
        list(
            pool.map(lambda p: server.generate(p, max_new_tokens=tokens, ignore_eos=True), prompts)
        )


def per_round(before: Stages, after: Stages) -> dict[str, float]:
    """Milliseconds of each stage, averaged over the rounds between two reports."""

    def gained(stage: str, field: str) -> float:
        return after[stage][field] - before.get(stage, {}).get(field, 0.0)

    rounds = gained("round", "calls")
    stages = {
        stage: 1e3 * gained(stage, "seconds") / rounds
        for stage in ("round", "draft_forward", "target_forward", "accept", "commit")
    }
    stages["host"] = stages["round"] - stages["draft_forward"] - stages["target_forward"]
    around = sum(gained(stage, "seconds") for stage in ("schedule", "process_result"))
    stages["scheduler"] = 1e3 * around / rounds
    return {stage: round(value, 3) for stage, value in stages.items()}


def table(results: dict[int, dict[str, float]]) -> Table:
    shown = Table(title="milliseconds a round")
    shown.add_column("stage")
    for batch in results:
        shown.add_column(f"batch {batch}", justify="right")
    for stage in next(iter(results.values())):
        shown.add_row(stage, *(f"{result[stage]:.2f}" for result in results.values()))
    return shown


if __name__ == "__main__":
    main(tyro.cli(RoundCostConfig))
