# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias.

    Args:
        x: [T, K] float32, float16 or bfloat16, any row stride.
        weight: [M, K], same dtype.
        bias: [M], same dtype, or None.
        output: [T, M], same dtype; allocated when absent. Or float32: the sums without their rounding, no bias.

    Returns:
        output.

    At most 128 rows of float16 or bfloat16 on sm_90 (`linear_plan` says) and at most 32 of float32 on a CPU stream the
    weights once, and a row's bits do not depend on the other rows; everything else is the library's GEMM.
    """
    if output is None:
        output = x.new_empty(x.shape[0], weight.shape[0])
    torch.ops.dflash.linear(x, weight, bias, output)
    return output


@torch.library.register_fake("dflash::linear")
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor
) -> None:
    return None


def linear_plan(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int, int] | None:
    """(rows, warpgroups, splits) of the streaming GEMM that `linear` runs for these on a GPU; None: it does not.

    x is padded to `rows`, a tile has 64 outputs a warpgroup, K is summed in `splits` parts.
    """
    return tuple(torch.ops.dflash.linear_plan(x, weight)) or None


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same in plain torch, in fp64, as x's or another dtype; never serves."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(dtype or x.dtype)
