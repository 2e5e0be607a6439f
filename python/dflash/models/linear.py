# SPDX-License-Identifier: Apache-2.0
"""The one seam every matrix of the target and the drafter goes through."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias: [T, K] with [M, K] to [T, M], accumulated in fp32."""
    return F.linear(x, weight, bias)
