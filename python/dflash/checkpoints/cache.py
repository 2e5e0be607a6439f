# SPDX-License-Identifier: Apache-2.0
"""The cache folder: entries appear whole or not at all, and a full disk is one readable error."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dflash.errors import DflashError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def cache_dir() -> Path:
    """$DFLASH_CACHE, or ~/.cache/dflash."""
    named = os.environ.get("DFLASH_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "dflash"


@contextmanager
def new_entry(final: Path) -> Iterator[Path]:
    """A folder beside `final` to write in; renamed to `final` on success, removed on failure.

    Raises:
        DflashError: the disk is full or the cache cannot be written.
    """
    with disk_errors(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name[:16]}-", dir=final.parent))
        try:
            yield temporary
            temporary.chmod(0o755)  # the temporary folder and safetensors' files are private
            for path in temporary.iterdir():
                path.chmod(0o644)
            _publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turns a failed write below `where` into a DflashError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_SPACE:
            raise _disk_full(where) from error
        raise DflashError(
            f"cannot write the cache {where}: {error.strerror or error}; "
            "set DFLASH_CACHE to a folder that can be written"
        ) from error
    except SafetensorError as error:
        # safetensors reports the operating system's error only in its text.
        if any(f"os error {code}" in str(error) for code in NO_SPACE):
            raise _disk_full(where) from error
        raise DflashError(f"cannot write the cache {where}: {error}") from error


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _publish(temporary: Path, final: Path) -> None:
    try:
        temporary.rename(final)
    except OSError:
        # Another process was first: the same content is there.
        if not final.is_dir():
            raise


def _disk_full(where: Path) -> DflashError:
    return DflashError(
        f"the disk of the cache {where} is full: free some space, or set DFLASH_CACHE to a folder "
        "on another disk"
    )
