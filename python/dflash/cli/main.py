# SPDX-License-Identifier: Apache-2.0
"""Puts the commands together and turns every error into one line and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import traceback

import typer

from dflash.cli.bench import bench
from dflash.cli.generate import generate
from dflash.cli.info import info
from dflash.errors import DflashError
from dflash.log import logger

EXIT_USAGE = 2  # an argument or a checkpoint is wrong
EXIT_FAILURE = 1  # the world around it is: network, disk, driver
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="dflash",
    help="DFlash speculative decoding: several tokens a step, none of them changed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: no flag is cut short at 80 columns
)
app.command()(generate)
app.command()(bench)
app.command()(info)


def main() -> None:
    """Entry point of the `dflash` command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings are not ours to give
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="dflash", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `dflash generate ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILURE)
    except Exception as error:
        if logger.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        line, code = describe(error)
        print(f"dflash: error: {line}", file=sys.stderr)
        sys.exit(code)


def describe(error: Exception) -> tuple[str, int]:
    """The line that a user reads, and the exit code."""
    usage_message = getattr(error, "format_message", None)  # typer's and click's own
    if usage_message is not None:
        return f"{_one_line(usage_message())} (dflash --help lists the arguments)", EXIT_USAGE
    if isinstance(error, ValueError):
        return _one_line(str(error)), EXIT_USAGE
    if isinstance(error, DflashError):
        return _one_line(str(error)), EXIT_FAILURE
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}".removeprefix("None: "), EXIT_FAILURE
    first_line = next(iter(str(error).strip().splitlines()), "")
    hint = "" if logger.isEnabledFor(logging.DEBUG) else " (DFLASH_LOG_LEVEL=DEBUG shows where)"
    return f"{type(error).__name__}: {first_line}{hint}", EXIT_FAILURE


def _one_line(message: str) -> str:
    return " ".join(message.split())
