"""The programs of docs/examples, run as a reader runs them."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

from harness import FIXTURE, Server

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CLIENTS = ("frontend.py", "openai_client.py")


def run_client(name: str, server: Server) -> str:
    """What a client program prints, run as a script within this process."""
    argv = [str(EXAMPLES / name), "--base-url", str(server.client.base_url).rstrip("/")]
    printed = io.StringIO()
    with patch.object(sys, "argv", argv), contextlib.redirect_stdout(printed):
        runpy.run_path(argv[0], run_name="__main__")
    return printed.getvalue()


def attempt_client(name: str, server: Server) -> str:
    """What a client program prints or, so that only its own test fails, how it ended."""
    try:
        return run_client(name, server)
    except Exception:
        return traceback.format_exc()


def run_program(name: str, *args: str, **env: str) -> str:
    """What a program prints that starts processes of its own."""
    script = EXAMPLES / name
    command = [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]
    done = subprocess.run(
        [*command, *args],
        env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_engine() -> str:
    return run_program(
        "offline_engine.py",
        *("--target", str(FIXTURE / "target"), "--head", str(FIXTURE / "head")),
        *("--dtype", "float32", "--context-length", "512", "--max-total-tokens", "16384"),
        SGLANG_PLUGINS="jetspec,jetspec_cpu",
    )
