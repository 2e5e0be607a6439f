# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import dflash

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    in_cmake = re.search(r"project\(dflash VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    in_project = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert in_cmake and in_cmake[1] == dflash.__version__
    assert in_project and in_project[1] == dflash.__version__
