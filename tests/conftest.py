# SPDX-License-Identifier: Apache-2.0
import pytest
import torch


def pytest_collection_modifyitems(config, items):
    """GPU tests run where a GPU is, long ones where they are asked for (-m long); elsewhere they are deselected and
    counted, never reported as passed.
    """
    names = [] if torch.cuda.is_available() else ["gpu"]
    names += [] if "long" in config.option.markexpr else ["long"]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in names)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def one_thread():
    """For small models: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
