# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch.nn import functional as F

TURN = 8
"""Rows of gate, then as many of up."""


def linear_silu_mul_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) for a weight of bytes.

    Args:
        x: [T, K] float32, float16 or bfloat16, any row stride.
        weight: float8_e4m3fn without NaN, `pack_fp8` of [2 * I, K] whose rows are `in_turns`; I % 8 is 0.
        scale: float32 [2 * I], in turns like the rows.
        output: [T, I], x's dtype; allocated when absent.

    Returns:
        output: the bits of `linear_fp8` and `silu_mul`, in one kernel where `linear_fp8` streams the weight on a GPU.
    """
    if output is None:
        output = x.new_empty(x.shape[0], scale.shape[0] // 2)
    torch.ops.dflash.linear_silu_mul_fp8(x, weight, scale, output)
    return output


@torch.library.register_fake("dflash::linear_silu_mul_fp8")
def _(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, output: torch.Tensor) -> None:
    return None


def in_turns(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate's rows and then up's, [2 * I, K], as 8 of gate and 8 of up in turns."""
    size = gate_up.shape[1]
    return gate_up.view(2, -1, TURN, size).transpose(0, 1).reshape(-1, size)


def linear_silu_mul_fp8_reference(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The same in plain torch, in fp64, of gate and then up as they are before they are packed; never serves."""
    products = (x.double() @ weight.double().T) * scale.double()
    gate, up = products.to(x.dtype).double().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)
