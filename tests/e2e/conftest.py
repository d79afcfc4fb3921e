"""Real servers on the tiny fixture model, one at a time, shared by configuration.

An idle SGLang server polls and slows the next one, so a server is stopped before another starts;
pytest groups the tests that share a session-scoped parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import law
import pytest
from features import FEATURES
from harness import PLAIN, Answer, Server
from workloads import WORKLOADS


@dataclass(frozen=True)
class Plain:
    """What the server without speculation says, asked once a session."""

    answers: dict[str, list[Answer]]
    draws: dict[str, list[list[int]]]


@pytest.fixture(scope="session")
def plain() -> Plain:
    with PLAIN.server() as server:
        return Plain(
            {name: asked.ask(server) for name, asked in (WORKLOADS | FEATURES).items()},
            {name: law.draw(server, settings) for name, settings in law.SETTINGS.items()},
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
