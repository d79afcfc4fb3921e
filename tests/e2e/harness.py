"""Server configurations of the end-to-end tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_jetspec.tools.bench.server import Server
from sglang_jetspec.tools.fuzz.run import reference_environment

__all__ = ["LLGUIDANCE", "PLAIN", "Answer", "Server", "Setup", "generate_all", "sabotaged", "tree"]

Answer = dict[str, Any]
HERE = Path(__file__).parent
FIXTURE = HERE.parent / "fixtures" / "tiny-qwen3"
PLAIN_ARGS = (
    *("--model-path", str(FIXTURE / "target"), "--device", "cpu", "--dtype", "float32"),
    *("--context-length", "512", "--max-total-tokens", "16384"),
    *("--max-running-requests", "64", "--random-seed", "7", "--enable-custom-logit-processor"),
)
# Where the client programs run too; the fixture would fill their JSON with white space.
LLGUIDANCE = (
    *("--grammar-backend", "llguidance", "--tool-call-parser", "qwen25"),
    "--constrained-json-disable-any-whitespace",
)
HEAD_ARGS = (
    *("--speculative-algorithm", "JETSPEC"),
    *("--speculative-draft-model-path", str(FIXTURE / "head")),
)


@dataclass(frozen=True)
class Setup:
    """A server configuration: what is added to the plain one."""

    name: str
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    speculative: bool = True

    def server(self) -> Server:
        args = PLAIN_ARGS + (HEAD_ARGS if self.speculative else ()) + self.args
        env = {
            "SGLANG_PLUGINS": "jetspec,jetspec_cpu",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "OMP_NUM_THREADS": "1",
            **dict(self.env),
        }
        return Server(args, env)


def tree(nodes: int, width: int, depth: int, *args: str, **env: str) -> Setup:
    """JETSPEC with a tree of that shape."""
    shape = (
        *("--speculative-num-draft-tokens", str(nodes)),
        *("--speculative-eagle-topk", str(width), "--speculative-num-steps", str(depth)),
    )
    name = "-".join((f"n{nodes}w{width}d{depth}", *(a.strip("-") for a in args), *env))
    return Setup(name, shape + args, tuple(env.items()))


def plugin(name: str) -> dict[str, str]:
    """The environment that adds the plug-in of a folder beside this file."""
    path = os.pathsep.join(filter(None, (str(HERE / name), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": f"jetspec,jetspec_cpu,jetspec_{name}"}


def small_pool(**env: str) -> Setup:
    """A KV pool too small for 16 requests, which are admitted all the same and then retracted."""
    return tree(16, 4, 7, "--max-total-tokens", "700", SGLANG_INIT_NEW_TOKEN_RATIO="0.1", **env)


def sabotaged(step: str) -> Setup:
    """JETSPEC with one step of its round broken (negative control)."""
    whole = tree(16, 4, 7, **plugin("sabotage"), JETSPEC_SABOTAGE=step)
    return Setup(step, whole.args, whole.env)


PLAIN = Setup("plain", env=tuple(reference_environment().items()), speculative=False)


def generate_all(
    server: Server, prompts: Sequence[Sequence[int]], batch: int, **sampling: Any
) -> list[Answer]:
    """Answers in order, ``batch`` requests in flight."""
    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(lambda ids: server.generate(list(ids), **sampling), prompts))
