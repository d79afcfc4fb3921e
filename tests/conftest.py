"""Triton's kernels run in its interpreter where there is no GPU.

Triton reads the variable when it is imported, and importing SGLang or torch may do that.
"""

import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wide", action="store_true", help="every configuration of a server")
