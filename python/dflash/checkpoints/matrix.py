# SPDX-License-Identifier: Apache-2.0
"""The forms that a model's matrix has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix [M, K] of bytes, see ops/linear_fp8.py.

    in_turns: of gate and up, see ops/linear_silu_mul_fp8.py. is_streamed: rows of the model's dtype
    stream it on its device.
    """

    weight: torch.Tensor  # float8_e4m3fn [ceil(M / 64), ceil(K / 64), 4096], packed
    scale: torch.Tensor  # float32 [M]
    in_turns: bool = False
    is_streamed: bool = False


Matrix: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...] | Fp8Matrix
"""A matrix, or several that stand for their rows below each other, a bias likewise; or one in fp8."""
