"""`jetspec serve`: SGLang's own launcher, with JETSPEC and a model pair filled in."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from sglang_jetspec.tools.model_pair import resolve_pair


def command_line(
    target: str, head: str, host: str, port: int, others: Sequence[str] = ()
) -> list[str]:
    """What `jetspec serve` runs; the device's defaults come from SGLang and the platform."""
    return [
        sys.executable,
        *("-m", "sglang.launch_server", "--model-path", target),
        *("--speculative-algorithm", "JETSPEC", "--speculative-draft-model-path", head),
        *("--host", host, "--port", str(port)),
        *others,
    ]


def example_request(host: str, port: int) -> str:
    """A curl line that asks the server something."""
    address = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return (
        f"curl http://{address}:{port}/v1/chat/completions -H 'Content-Type: application/json' "
        """-d '{"model": "default", "max_tokens": 128, "messages": """
        """[{"role": "user", "content": "Explain in two sentences why the sky is blue."}]}'"""
    )


def serve(
    target: str | None, head: str | None, host: str, port: int, others: Sequence[str] = ()
) -> NoReturn:
    """Replaces this process by the server; without a target, by one with the demo pair."""
    line = command_line(*resolve_pair(target, head), host, port, others)
    print(shlex.join(line))
    print(f"\nOnce the server says that it is ready, try:\n\n  {example_request(host, port)}\n")
    sys.stdout.flush()
    os.execv(sys.executable, line)
