"""Real servers on the tiny fixture model, one at a time, shared by configuration.

An idle SGLang server polls and slows the next one, so a server is stopped before another starts;
pytest groups the tests that share a session-scoped parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz
import law
import pytest
from features import FEATURES, GRAMMAR_FEATURES, SEED_FEATURES
from harness import (
    CROWDED,
    FURTHER_FORESIGHT,
    LLGUIDANCE,
    PLAIN,
    SEEDED_PLAIN,
    SHORT_HEAD,
    Answer,
    Server,
    Setup,
    assert_no_slot_is_lost,
    small_pool,
    tree,
)
from programs import CLIENTS, attempt_client
from workloads import OFFLINE, WORKLOADS, changed_target, use_target

RUNNING: list[Server] = []

# What `make test` leaves to `make test-wide`: further configurations and the example programs.
WIDE_FILES = {"test_heads.py", "test_observability.py", "test_tensor_parallel.py"}
WIDE_TESTS = {
    "test_a_grammar_backend_without_rollback_is_refused",
    "test_a_client_prints_what_it_prints_without_speculation",
    "test_streamed_tool_calls_equal_the_whole",
    "test_the_clients_show_what_they_are_about",
    "test_the_offline_engine_writes_what_a_server_without_speculation_writes",
}
WIDE_SETUPS = {
    *(setup.name for setup in FURTHER_FORESIGHT),
    CROWDED.name,
    SHORT_HEAD.name,
    tree(16, 4, 7, SGLANG_JETSPEC_CPU_OVERLAP="1").name,
    tree(16, 4, 7, *LLGUIDANCE, SGLANG_JETSPEC_CPU_OVERLAP="1").name,
    small_pool("--page-size", "16", SGLANG_JETSPEC_CPU_OVERLAP="1").name,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """These tests come last; wide ones only with --wide or where a single test is named.

    Last, because ``sglang.Engine`` ends every child of its process, servers included.
    """
    items.sort(key=lambda item: "e2e" in item.path.parts)
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
    if config.getoption("--wide") or any("test_" in Path(arg).name for arg in config.args):
        return
    wide = [item for item in items if is_wide(item)]
    config.hook.pytest_deselected(items=wide)
    items[:] = [item for item in items if item not in wide]


def is_wide(item: pytest.Item) -> bool:
    """Whether a test runs in a wide configuration."""
    call = getattr(item, "callspec", None)
    setup = call.params.get("server") if call else None
    named = item.path.name in WIDE_FILES or getattr(item, "originalname", "") in WIDE_TESTS
    return named or getattr(setup, "name", None) in WIDE_SETUPS


@dataclass(frozen=True)
class Plain:
    """What servers without speculation say, asked once a session."""

    answers: dict[str, list[Answer]]
    draws: dict[str, list[list[int]]]
    llguidance: dict[str, list[Answer]]
    seeded: dict[str, list[Answer]]
    changed: list[Answer]
    fuzz: list[Any]
    programs: dict[str, str]


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with other weights."""
    return changed_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def plain(other_target: Path) -> Plain:
    with SEEDED_PLAIN.server() as server:
        llguidance = {name: asked.ask(server) for name, asked in GRAMMAR_FEATURES.items()}
        seeded = {name: asked.ask(server) for name, asked in SEED_FEATURES.items()}
        printed = {name: attempt_client(name, server) for name in CLIENTS}
    with PLAIN.server() as server:
        asked_all = WORKLOADS | FEATURES | OFFLINE
        answers = {name: asked.ask(server) for name, asked in asked_all.items()}
        draws = {name: law.draw(server, settings) for name, settings in law.SETTINGS.items()}
        random_requests = fuzz.ask_all(server)
        use_target(server, other_target)
        changed = WORKLOADS["single"].ask(server)
    return Plain(answers, draws, llguidance, seeded, changed, random_requests, printed)


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, plain: Plain) -> Iterator[Server]:
    """The server of the test's ``Setup`` (indirect parameter), started once for all its tests."""
    with request.param.server() as running:
        RUNNING.append(running)
        yield running
        RUNNING.remove(running)
        assert_no_slot_is_lost(running)


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Setup:
    """The configuration of the test's server."""
    found: Setup = request.node.callspec.params["server"]
    return found


@pytest.fixture(scope="session")
def lengths() -> dict[str, dict[Setup, float]]:
    """Acceptance lengths seen so far, by workload and configuration."""
    return {}


@pytest.fixture(scope="module", autouse=True)
def no_slot_is_lost() -> Iterator[None]:
    """After each module, and at the end of each server (above)."""
    yield
    for running in RUNNING:
        assert_no_slot_is_lost(running)
