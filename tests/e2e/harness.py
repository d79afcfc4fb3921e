"""Server configurations of the end-to-end tests."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from sglang_jetspec.tools.bench.server import Server
from sglang_jetspec.tools.fuzz.run import reference_environment

__all__ = [
    "CROWDED",
    "FORESIGHT",
    "FURTHER_FORESIGHT",
    "GOLDEN",
    "GOLDEN_FOLDER",
    "LLGUIDANCE",
    "PAGED",
    "PLAIN",
    "SABOTAGED",
    "SEEDED_PLAIN",
    "SHORT_HEAD",
    "Answer",
    "Server",
    "Setup",
    "assert_no_slot_is_lost",
    "broken",
    "foresight",
    "generate_all",
    "short_head",
    "small_pool",
    "tree",
    "wait_until_idle",
]

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
# What SGLang can check of its pools: in every busy step, page by page, at every allocation. It
# checks in idle steps by itself, and an error ends the server.
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}
LEAK = re.compile(r"mem(ory)? leak|double free|use-after-free", re.IGNORECASE)
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
    # Nodes, width and depth, where acceptance lengths can be compared with other shapes'.
    shape: tuple[int, int, int] | None = None
    reach: int | None = None  # positions the head says it was trained on, if not its own

    def server(self) -> Server:
        args = PLAIN_ARGS + (HEAD_ARGS if self.speculative else ()) + self.args
        if self.reach is not None:
            args += ("--speculative-draft-model-path", short_head(self.reach))
        env = {
            "SGLANG_PLUGINS": "jetspec,jetspec_cpu",
            **STRICT,
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": None,
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
    # The overlap schedule counts a round past each request's end; Algorithm 1 is another tree.
    comparable = None if env else (nodes, width, depth)
    return Setup(name, shape + args, tuple(env.items()), shape=comparable)


def plugin(name: str) -> dict[str, str]:
    """The environment that adds the plug-in of a folder beside this file."""
    path = os.pathsep.join(filter(None, (str(HERE / name), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": f"jetspec,jetspec_cpu,jetspec_{name}"}


def small_pool(*args: str, **env: str) -> Setup:
    """A KV pool too small for 16 requests, which are admitted all the same and then retracted."""
    pool = ("--max-total-tokens", "704", *args)
    return tree(16, 4, 7, *pool, SGLANG_INIT_NEW_TOKEN_RATIO="0.1", **env)


GOLDEN_FOLDER = Path(tempfile.mkdtemp(prefix="jetspec-golden-"))
atexit.register(shutil.rmtree, GOLDEN_FOLDER, ignore_errors=True)
GOLDEN = replace(
    tree(8, 2, 4, **plugin("golden"), JETSPEC_GOLDEN=str(GOLDEN_FOLDER)),
    name="n8w2d4, golden",
    shape=(8, 2, 4),
)
PAGED = replace(
    tree(
        *(16, 4, 7, "--page-size", "16", "--chunked-prefill-size", "64"),
        *("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3"),
    ),
    name="paged",
)
SHORT_HEAD = replace(
    tree(12, 4, 7, "--page-size", "64", SGLANG_JETSPEC_TREE="algorithm1"),
    name="short-head",
    reach=96,
)
CROWDED = replace(small_pool("--enable-priority-scheduling"), name="small-pool")


def foresight(plan: str, outcomes: int, *args: str, nodes: int = 16, **env: str) -> Setup:
    """JetSpec++: ``plan`` "JR", J passes and R refreshes, a digit each."""
    options = dict(zip(("PASSES", "REFRESHES", "OUTCOMES"), [*plan, str(outcomes)], strict=True))
    env = {f"SGLANG_JETSPEC_{name}": value for name, value in options.items()} | env
    args = (
        *("--speculative-draft-model-path", str(FIXTURE / "jetspecpp")),
        *("--speculative-num-draft-tokens", str(nodes), *args),
    )
    name = "-".join((f"J{plan[0]}R{plan[1]}B{outcomes}", *(a.strip("-") for a in args[4:]), *env))
    return Setup(name, args, tuple(env.items()))


OVERLAP = {"SGLANG_JETSPEC_CPU_OVERLAP": "1"}
FORESIGHT = foresight("11", 4, **OVERLAP)
FURTHER_FORESIGHT = [
    foresight("33", 8, "--page-size", "16", "--chunked-prefill-size", "64"),
    foresight("31", 4, SGLANG_JETSPEC_RULE="uncalibrated", **OVERLAP),
    foresight("30", 0, nodes=12),
    foresight("00", 1, SGLANG_JETSPEC_RULE="geometric"),
    foresight("00", 0, "--speculative-eagle-topk", "4", "--speculative-num-steps", "7"),
]


@cache
def short_head(reach: int) -> str:
    """A copy of the fixture's head that says it was trained on ``reach`` positions."""
    folder = Path(tempfile.mkdtemp(prefix="jetspec-head-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(FIXTURE / "head", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = reach
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


SABOTAGE = GOLDEN_FOLDER / "sabotage"
SABOTAGE.write_text("")
SABOTAGED = replace(
    tree(16, 4, 7, **plugin("sabotage"), JETSPEC_SABOTAGE=str(SABOTAGE)),
    name="sabotaged",
    shape=None,
)


@contextmanager
def broken(step: str) -> Iterator[None]:
    """One step of a sabotaged server's rounds is broken meanwhile (negative control)."""
    SABOTAGE.write_text(step)
    yield
    SABOTAGE.write_text("")


def with_plugin(setup: Setup, name: str, **more: str) -> Setup:
    """``setup`` with one more plug-in beside this file."""
    env = dict(setup.env)
    added = plugin(name)
    folders = os.pathsep.join((str(HERE / name), env["PYTHONPATH"]))
    plugins = ",".join((env["SGLANG_PLUGINS"], added["SGLANG_PLUGINS"].split(",")[-1]))
    env |= {"PYTHONPATH": folders, "SGLANG_PLUGINS": plugins, **more}
    return replace(setup, env=tuple(env.items()))


PLAIN = Setup("plain", env=tuple(reference_environment().items()), speculative=False)


# Draws by seeds; everything else as PLAIN does.
SEEDED_PLAIN = with_plugin(replace(PLAIN, args=LLGUIDANCE), "seeds", TORCHDYNAMO_DISABLE="1")


def wait_until_idle(server: Server, seconds: float = 30.0) -> None:
    """Flushes the cache, which succeeds only when nothing runs and nothing waits."""
    deadline = time.monotonic() + seconds
    while server.client.post("/flush_cache").status_code != 200:
        assert time.monotonic() < deadline, "requests are still running"
        time.sleep(0.2)


def used_tokens(server: Server) -> int:
    """KV slots that are neither free nor cached."""
    return int(server.client.get("/v1/loads").json()["loads"][0]["num_used_tokens"])


def assert_no_slot_is_lost(server: Server) -> None:
    """After a flush every slot is free again, and the server never logged a leak."""
    wait_until_idle(server)
    deadline = time.monotonic() + 15.0
    while (used := used_tokens(server)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert used == 0, f"{used} KV slots are not free in an idle server"
    found = [line for line in server.log_text().splitlines() if LEAK.search(line)]
    assert not found, found[:3]


def generate_all(
    server: Server, prompts: Sequence[Sequence[int]], batch: int, **sampling: Any
) -> list[Answer]:
    """Answers in order, ``batch`` requests in flight."""
    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(lambda ids: server.generate(list(ids), **sampling), prompts))
