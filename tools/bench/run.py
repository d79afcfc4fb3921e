"""`jetspec bench`: every arm's real server in turn, the same prompts, a table, a JSON line."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_jetspec.tools.bench.arms import Arm, parse_arms
from sglang_jetspec.tools.bench.config import BenchConfig
from sglang_jetspec.tools.bench.measure import Pass, run_pass, warm_up
from sglang_jetspec.tools.bench.prompts import Prompt, data_files, encode, load_rows
from sglang_jetspec.tools.bench.server import Server
from sglang_jetspec.tools.bench.summary import summarize
from sglang_jetspec.tools.model_pair import resolve_pair

ServerFactory = Callable[[list[str], dict[str, str], Path | None], Server]


def start_server(args: list[str], env: dict[str, str], log: Path | None) -> Server:
    return Server(args, env, log=log)


def server_args(config: BenchConfig, arm: Arm, target: str, head: str) -> list[str]:
    """One arm's whole command line, but for the port."""
    # Metrics: without them no answer says when its first token was there.
    shared = ["--model-path", target, "--dtype", config.dtype]
    shared += ["--log-level", "warning", "--enable-metrics"]
    return [*shared, *shlex.split(config.server_args), *arm.server_args(head)]


def measure(
    config: BenchConfig,
    arms: Sequence[Arm],
    prompts: dict[str, list[Prompt]],
    models: tuple[str, str],
    progress: Progress,
    factory: ServerFactory = start_server,
) -> Iterator[Pass]:
    """Yields the passes as they are done; a server lives only while its own passes run."""
    total = sum(map(len, prompts.values()))
    overall = progress.add_task("all", total=total * len(arms) * config.repeats)
    for repeat in range(config.repeats):
        for arm in arms:
            log = config.out / f"{arm.kind}-{arms.index(arm)}-{repeat}.log" if config.out else None
            label = f"{arm.name}, repeat {repeat + 1} of {config.repeats}"
            progress.update(overall, description=f"{label}: starting the server")
            with factory(server_args(config, arm, *models), arm.env, log) as server:
                warm_up(server, next(iter(prompts.values())))
                for task, own in prompts.items():
                    progress.update(overall, description=f"{label}: {task}")
                    yield run_pass(
                        server,
                        arm.name,
                        repeat,
                        own,
                        batch=config.batch,
                        max_tokens=config.max_tokens,
                        ignore_eos=config.ignore_eos,
                        advance=lambda: progress.advance(overall),
                    )


def run(config: BenchConfig, factory: ServerFactory = start_server) -> dict[str, Any]:
    """Measures and returns the summary; raises ValueError, DataError or ServerError."""
    arms = parse_arms(config.arms)
    rows = [load_rows(path, config.limit) for path in data_files(config.data)]
    needs_head = not all(arm.is_baseline for arm in arms)
    models = resolve_pair(config.target, config.head, needs_head)
    from transformers import AutoTokenizer  # seconds, so only once the options are known to be good

    tokenizer = AutoTokenizer.from_pretrained(models[0])
    prompts: dict[str, list[Prompt]] = {}
    for prompt in (prompt for part in rows for prompt in encode(part, tokenizer)):
        prompts.setdefault(prompt.task, []).append(prompt)
    if config.out:
        config.out.mkdir(parents=True, exist_ok=True)
    with terminable(), _progress() as progress:
        passes = list(measure(config, arms, prompts, models, progress, factory))
    result = summarize(passes, arms)
    result["setting"] = setting(config, models)
    if config.out:
        (config.out / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        lines = [msgspec.json.encode(p) + b"\n" for p in passes]
        (config.out / "passes.jsonl").write_bytes(b"".join(lines))
    return result


def setting(config: BenchConfig, models: tuple[str, str]) -> dict[str, Any]:
    """What a reader needs to repeat the run."""
    return {
        "target": models[0],
        "head": models[1],
        "dtype": config.dtype,
        "batch": config.batch,
        "max_tokens": config.max_tokens,
        "ignore_eos": config.ignore_eos,
        "repeats": config.repeats,
        "limit": config.limit,
        "server_args": config.server_args,
        "cpus": len(os.sched_getaffinity(0)),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("sglang-jetspec", "sglang", "torch")},
    }


@contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into SystemExit, so that a server in a `with` block is ended, not orphaned."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def table(result: dict[str, Any]) -> Table:
    """The result for people: a row per task and arm."""
    shown = Table(title=f"batch {result['setting']['batch']}, {result['setting']['dtype']}")
    for column in ("task", "arm"):
        shown.add_column(column, overflow="fold")
    for column in ("tok/s", "decode", "tok/round", "speed-up", "same"):
        shown.add_column(column, justify="right", no_wrap=True)
    for task, part in {**result["tasks"], "all": result}.items():
        for name, arm in part["arms"].items():
            speedup = part.get("speedup", {}).get(name)
            same = part.get("identical", {}).get(name, {}).get("share")
            shown.add_row(
                task,
                name,
                f"{arm['tok_per_s']:.1f}",
                _number(arm["decode_tok_per_s"], ".1f"),
                _number(arm["acceptance_length"], ".2f"),
                _number(speedup, ".2f"),
                _number(same, ".0%"),
            )
        shown.add_section()
    return shown


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(config: BenchConfig) -> None:
    """Runs, prints the table, and the JSON as the last line."""
    result = run(config)
    Console().print(table(result))
    print(json.dumps(result))
