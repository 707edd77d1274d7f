"""What every test shares: tests that need a CUDA device are skipped where there is none."""

from __future__ import annotations

import pytest

pytest_plugins = ["serving"]  # the container that several folders share


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only now: collecting the other tests must not wait for it

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
