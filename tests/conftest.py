# SPDX-License-Identifier: Apache-2.0
import pytest
import torch


def pytest_collection_modifyitems(config, items):
    """GPU tests run where a GPU is; elsewhere they are deselected and counted, never reported as passed."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
