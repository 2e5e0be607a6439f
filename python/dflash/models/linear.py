# SPDX-License-Identifier: Apache-2.0
"""The one seam every matrix of the target and the drafter goes through."""

from __future__ import annotations

from dflash.ops.linear import linear

__all__ = ["linear"]
