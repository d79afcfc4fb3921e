"""Tests that need a CUDA GPU; without one they are skipped, by that name."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "gpu" in item.path.parts]
    for item in here:
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
