# SPDX-License-Identifier: Apache-2.0
"""Finds PyPI's `dflash`, the authors' reference package: it writes the same folder as this one."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path

from dflash.log import log_once

PACKAGE_DIR = Path(__file__).parent
SENTINEL = "model_mlx.py"  # a file of theirs that this package never ships


def find_conflict() -> str | None:
    """What is wrong and what to do, or None when this environment has only dflash-cuda."""
    try:
        found = f"dflash {metadata.version('dflash')}"
    except metadata.PackageNotFoundError:
        if not (PACKAGE_DIR / SENTINEL).exists():
            return None
        found = "dflash"
    return (
        f"PyPI's {found} (the authors' reference package) is in this environment and writes the "
        f"same folder, {PACKAGE_DIR}. Keep the two in separate environments: "
        "pip uninstall -y dflash dflash-cuda, then install dflash-cuda again"
    )


def report_conflict() -> bool:
    """Whether the other package is here; says so once in a process, as an error."""
    conflict = find_conflict()
    if conflict is not None:
        log_once(conflict, logging.ERROR)
    return conflict is not None
