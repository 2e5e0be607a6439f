# SPDX-License-Identifier: Apache-2.0
"""The `dflash` logger. DFLASH_LOG_LEVEL sets its level; WARNING is the default."""

from __future__ import annotations

import logging
import os
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

logger = logging.getLogger("dflash")

_seen: set[str] = set()


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, and only where the application configured no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers:
            return
        sys.stderr.write(f"dflash: {record.levelname.lower()}: {self.format(record)}\n")


def level_from_environment() -> int:
    """The level that DFLASH_LOG_LEVEL names; ValueError for a name that is none."""
    name = os.environ.get("DFLASH_LOG_LEVEL", "").strip().upper() or "WARNING"
    if name not in LEVELS:
        raise ValueError(
            f"DFLASH_LOG_LEVEL={name!r} is not a level: expected one of {', '.join(LEVELS)}"
        )
    return getattr(logging, name)


def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message the first time it is said in this process: a fallback, or what "auto" chose."""
    if message in _seen:
        return
    _seen.add(message)
    logger.log(level, message)


def _configure() -> None:
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
    try:
        logger.setLevel(level_from_environment())
    except ValueError as error:  # an import must not fail for this; the command does
        logger.setLevel(logging.WARNING)
        logger.warning("%s; using WARNING", error)


_configure()
