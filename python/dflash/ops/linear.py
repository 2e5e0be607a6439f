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
        output: [T, M], same dtype; allocated when absent.

    Returns:
        output.

    float32 with at most 32 rows on a CPU streams the weights once, and a row's result does not depend
    on the other rows; everything else is the library's GEMM.
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


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same in plain torch, in fp64; never serves."""
    product = x.double() @ weight.double().T
    return (product if bias is None else product + bias.double()).to(x.dtype)
