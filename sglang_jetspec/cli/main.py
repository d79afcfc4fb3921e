"""The `jetspec` command. Subcommands import what they need only when they run."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from sglang_jetspec.tools.bench.config import BenchConfig, TraceConfig
from sglang_jetspec.tools.errors import CommandError
from sglang_jetspec.tools.foresight.config import AdapterTrainConfig, CalibrateConfig
from sglang_jetspec.tools.fuzz.config import FuzzConfig
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.config import parse as parse_training


@dataclass(frozen=True)
class Doctor:
    """Check this installation: versions, SGLang's hooks, plug-in, platform, head and target.

    Ends with code 0 when JETSPEC can serve, else 1.
    """

    target: str | None = None
    """Target to check a head against; the demo target if left out."""
    head: str | None = None
    """Draft head to check; the demo head if left out."""
    json: bool = False
    """Print one JSON object in place of the table."""


@dataclass(frozen=True)
class Serve:
    """Start an SGLang server with JETSPEC. Other flags are passed on to SGLang."""

    port: int = 30000
    host: str = "127.0.0.1"
    target: str | None = None
    """Target model folder or hub id; the demo target if left out."""
    head: str | None = None
    """Draft head folder or hub id; the demo head if left out."""


@dataclass(frozen=True)
class DemoPaths:
    """Prepare the demo target if needed, and print where it and its head are."""

    json: bool = False
    """Print one JSON object, {"target": ..., "head": ...}, as the last line."""


Command = (
    Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Serve, tyro.conf.subcommand("serve")]
    | Annotated[DemoPaths, tyro.conf.subcommand("demo-paths")]
    | Annotated[BenchConfig, tyro.conf.subcommand("bench")]
    | Annotated[TraceConfig, tyro.conf.subcommand("trace")]
    | Annotated[FuzzConfig, tyro.conf.subcommand("fuzz")]
    | Annotated[TrainConfig, tyro.conf.subcommand("train")]
    | Annotated[AdapterTrainConfig, tyro.conf.subcommand("train-adapter")]
    | Annotated[CalibrateConfig, tyro.conf.subcommand("calibrate")]
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; a refused option or a failed run is one line on stderr and code 2."""
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        if arguments[:1] == ["train"]:  # reads a file of options as well
            run(parse_training(arguments[1:]))
            return
        command, others = tyro.cli(
            Command,
            prog="jetspec",
            description="JetSpec speculative decoding for SGLang.",
            args=arguments,
            return_unknown_args=True,
        )
        if others and not isinstance(command, Serve):
            raise ValueError(f"unknown argument {others[0]}; see jetspec --help")
        run(command, others)
    except (ValueError, OSError, CommandError) as error:
        print(f"jetspec: {error}", file=sys.stderr)
        sys.exit(2)


def run(command: object, others: Sequence[str] = ()) -> None:
    """Dispatches a parsed command; `others` are flags for SGLang."""
    if isinstance(command, Doctor):
        from sglang_jetspec.cli.doctor import doctor

        sys.exit(doctor(command.target, command.head, as_json=command.json))
    elif isinstance(command, Serve):
        from sglang_jetspec.cli.serve import serve

        serve(command.target, command.head, command.host, command.port, others)
    elif isinstance(command, DemoPaths):
        from sglang_jetspec.tools.model_pair import resolve_pair

        target, head = resolve_pair(None, None)
        as_text = f"target {target}\nhead   {head}"
        print(json.dumps({"target": target, "head": head}) if command.json else as_text)
    elif isinstance(command, BenchConfig):
        from sglang_jetspec.tools.bench.run import main as bench

        bench(command)
    elif isinstance(command, TraceConfig):
        from sglang_jetspec.tools.bench.trace import main as trace

        trace(command)
    elif isinstance(command, FuzzConfig):
        from sglang_jetspec.tools.fuzz.run import main as fuzz

        fuzz(command)
    elif isinstance(command, TrainConfig):
        from sglang_jetspec.tools.train.run import run as train

        print(json.dumps(train(command)))
    elif isinstance(command, AdapterTrainConfig):
        from sglang_jetspec.tools.foresight.train_adapter import run as train_adapter

        print(json.dumps(train_adapter(command)))
    elif isinstance(command, CalibrateConfig):
        from sglang_jetspec.tools.foresight.calibrate import calibrate

        print(json.dumps(calibrate(command)))
