"""Real servers on the tiny fixture model, one at a time, shared by configuration.

An idle SGLang server polls and slows the next one, so a server is stopped before another starts;
pytest groups the tests that share a session-scoped parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import law
import pytest
from features import FEATURES, GRAMMAR_FEATURES, SEED_FEATURES
from harness import PLAIN, SEEDED_PLAIN, Answer, Server, Setup, assert_no_slot_is_lost
from workloads import WORKLOADS, changed_target, use_target

RUNNING: list[Server] = []


@dataclass(frozen=True)
class Plain:
    """What servers without speculation say, asked once a session."""

    answers: dict[str, list[Answer]]
    draws: dict[str, list[list[int]]]
    llguidance: dict[str, list[Answer]]
    seeded: dict[str, list[Answer]]
    changed: list[Answer]


@pytest.fixture(scope="session")
def other_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with other weights."""
    return changed_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def plain(other_target: Path) -> Plain:
    with SEEDED_PLAIN.server() as server:
        llguidance = {name: asked.ask(server) for name, asked in GRAMMAR_FEATURES.items()}
        seeded = {name: asked.ask(server) for name, asked in SEED_FEATURES.items()}
    with PLAIN.server() as server:
        answers = {name: asked.ask(server) for name, asked in (WORKLOADS | FEATURES).items()}
        draws = {name: law.draw(server, settings) for name, settings in law.SETTINGS.items()}
        use_target(server, other_target)
        changed = WORKLOADS["single"].ask(server)
    return Plain(answers, draws, llguidance, seeded, changed)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
