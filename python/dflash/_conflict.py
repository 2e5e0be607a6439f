# SPDX-License-Identifier: Apache-2.0
"""PyPI's `dflash`, the authors' reference package, installs into this package's folder."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

_PACKAGE_DIR = Path(__file__).parent
_THEIR_FILE = "model_mlx.py"  # in their wheel, never in ours


def conflict(package_dir: Path = _PACKAGE_DIR) -> str | None:
    """What is wrong, and what to do, when both packages share an environment; else None."""
    version = _their_version()
    leftover = (package_dir / _THEIR_FILE).exists()
    if version is None and not leftover:
        return None
    found = f"`dflash` {version}" if version else f"a file of `dflash` ({_THEIR_FILE})"
    return (
        f"{found}, the authors' reference package, is installed beside dflash-cuda: both provide "
        f"the import and the command `dflash` and overwrite each other's files ({package_dir}). "
        "Use separate environments: `pip uninstall dflash dflash-cuda`, `pip install dflash-cuda`"
    )


def _their_version() -> str | None:
    try:
        theirs = metadata.distribution("dflash")
    except metadata.PackageNotFoundError:
        return None
    return theirs.version
