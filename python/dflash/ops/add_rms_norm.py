# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch


def add_rms_norm(
    x: torch.Tensor | None,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    output: torch.Tensor | None = None,
    tap: torch.Tensor | None = None,
) -> torch.Tensor:
    """Residual addition and RMSNorm in one pass, which can write the residual stream to a tap.

    residual += x, rounded to its dtype; output = residual / sqrt(mean(residual^2) + eps) * weight,
    in fp32 from the rounded residual and rounded once; tap = residual.

    Args:
        x: [T, H], or None: the residual stays as it is and is only normed.
        residual: [T, H] float32, float16 or bfloat16; updated in place.
        weight: [H]. On a GPU it is read before earlier kernels are done: none of them may write it.
        eps: added to the mean square.
        output: [T, H], allocated when absent; must not overlap residual or tap.
        tap: [T, H] or None; any row stride, so a column slice of a [rows, n * H] buffer serves.

    All tensors have residual's dtype and a contiguous last dimension.

    Returns:
        output.

    Raises:
        RuntimeError: a tensor has another shape, dtype, device or last stride; the message names
            it.
    """
    if output is None:
        output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    torch.ops.dflash.add_rms_norm(x, residual, weight, eps, output, tap)
    return output


@torch.library.register_fake("dflash::add_rms_norm")
def _(x, residual, weight, eps, output, tap) -> None:
    return None


def add_rms_norm_reference(
    x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, new residual) in plain torch, in fp32; never serves."""
    if x is not None:
        residual = (residual.float() + x.float()).to(residual.dtype)
    h = residual.float()
    scale = torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + eps)
    return (h * scale * weight.float()).to(residual.dtype), residual
