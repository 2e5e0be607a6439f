# SPDX-License-Identifier: Apache-2.0
"""The command `dflash`."""

from dflash.cli.main import main

__all__ = ["main"]
