# SPDX-License-Identifier: Apache-2.0
"""Errors for the user: ValueError for what they gave, DflashError for the world around it."""

from __future__ import annotations


class DflashError(RuntimeError):
    """Something outside dflash failed: network, disk, driver. The message says what to do."""


class CheckpointError(ValueError):
    """A checkpoint that dflash cannot serve, or a pair that does not belong together."""
