"""Real servers on the tiny fixture model, one at a time, shared by configuration.

An idle SGLang server polls and slows the next one, so a server is stopped before another starts;
pytest groups the tests that share a session-scoped parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import fuzz
import law
import pytest
from features import FEATURES, GRAMMAR_FEATURES
from harness import LLGUIDANCE, PLAIN, Answer, Server
from programs import CLIENTS, attempt_client
from workloads import OFFLINE, WORKLOADS


@dataclass(frozen=True)
class Plain:
    """What servers without speculation say, asked once a session."""

    answers: dict[str, list[Answer]]
    draws: dict[str, list[list[int]]]
    llguidance: dict[str, list[Answer]]
    fuzz: list[Any]
    programs: dict[str, str]


@pytest.fixture(scope="session")
def plain() -> Plain:
    with replace(PLAIN, args=LLGUIDANCE).server() as server:
        llguidance = {name: asked.ask(server) for name, asked in GRAMMAR_FEATURES.items()}
        printed = {name: attempt_client(name, server) for name in CLIENTS}
    with PLAIN.server() as server:
        return Plain(
            {name: asked.ask(server) for name, asked in (WORKLOADS | FEATURES | OFFLINE).items()},
            {name: law.draw(server, settings) for name, settings in law.SETTINGS.items()},
            llguidance,
            fuzz.ask_all(server),
            printed,
        )


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, plain: Plain) -> Iterator[Server]:
    """The server of the test's ``Setup`` (indirect parameter), started once for all its tests."""
    with request.param.server() as running:
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in item.path.parts:
            item.add_marker(pytest.mark.e2e)
