# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch.nn import functional as F


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T).

    Args:
        x: [T, K] float32, float16 or bfloat16, any row stride.
        weight: [2 * I, K], same dtype: gate, then up.
        output: [T, I], same dtype; allocated when absent.

    Returns:
        output: the bits of `linear` and `silu_mul`, in one kernel where `linear` streams the weights on a GPU. One
            kernel may take 225 to 256 and 449 to 512 rows too: a row has the bits it has among at most 128, then.
    """
    if output is None:
        output = x.new_empty(x.shape[0], weight.shape[0] // 2)
    torch.ops.dflash.linear_silu_mul(x, weight, output)
    return output


@torch.library.register_fake("dflash::linear_silu_mul")
def _(x: torch.Tensor, weight: torch.Tensor, output: torch.Tensor) -> None:
    return None


def linear_silu_mul_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in plain torch, in fp64; never serves."""
    gate, up = (x.double() @ weight.double().T).to(x.dtype).chunk(2, dim=-1)
    return (F.silu(gate.double()) * up.double()).to(x.dtype)
