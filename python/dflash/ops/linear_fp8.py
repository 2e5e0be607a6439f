# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

TILE = 64
"""Outputs and inputs of a tile of a packed weight."""

_MAX = torch.finfo(torch.float8_e4m3fn).max


def linear_fp8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ (weight * scale[:, None]).T + bias for a weight of bytes.

    Args:
        x: [T, K] float32, float16 or bfloat16, any row stride.
        weight: float8_e4m3fn without NaN, [M, K] as `pack_fp8` packs it: [ceil(M / 64), ceil(K / 64), 4096].
        scale: float32 [M].
        bias: [M], x's dtype, or None.
        output: [T, M], x's dtype; allocated when absent.

    Returns:
        output: the sums of x and the unscaled weight in fp32, times the scale, plus the bias.

    float16 and bfloat16 on sm_90 stream the weight, half of `linear`'s bytes, once every 128 rows, and a row's bits do
    not depend on the other rows. Elsewhere on a GPU the weight is first unpacked into x's dtype (`fp8_is_streamed`).
    """
    if output is None:
        output = x.new_empty(x.shape[0], scale.shape[0])
    torch.ops.dflash.linear_fp8(x, weight, scale, bias, output)
    return output


@torch.library.register_fake("dflash::linear_fp8")
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    return None


def fp8_is_streamed(x: torch.Tensor) -> bool:
    """Whether linear_fp8 streams the weight for this x on a GPU."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] != 9:
        return False
    aligned = x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or x.stride(0) % 8 == 0)
    return x.dtype != torch.float32 and aligned


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [M, K] as float8_e4m3fn [M, K] and a scale a row, float32 [M]: its largest magnitude becomes 448.

    A row with NaN or infinity has such a scale.
    """
    scale = weight.abs().amax(dim=1, keepdim=True).float() / _MAX
    scale = torch.where(scale == 0, 1.0, scale)
    rounded = (weight / scale).clamp_(-_MAX, _MAX).to(torch.float8_e4m3fn)
    return rounded, scale.squeeze(1)


def pack_fp8(weight: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn [M, K] as linear_fp8 reads it; csrc/kernels/common/fp8_weight.h says why so."""
    m, k = weight.shape
    padded = torch.nn.functional.pad(weight.view(torch.uint8), (0, -k % TILE, 0, -m % TILE))
    groups, atoms = padded.shape[0] // TILE, padded.shape[1] // TILE
    # [group, warp, half, g] x [atom, chunk, eight, t, pair]
    split = padded.view(groups, 4, 2, 8, atoms, 2, 4, 4, 2)
    # [group, atom] x [warp, chunk, g, t, eight, pair, half], the lower half last
    packed = split.permute(0, 4, 1, 5, 3, 7, 6, 8, 2).flip(-1)
    return packed.reshape(groups, atoms, TILE * TILE).view(torch.float8_e4m3fn)


def unpack_fp8(packed: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """What pack_fp8 made of float8_e4m3fn [m, k]."""
    groups, atoms = packed.shape[:2]
    split = packed.view(torch.uint8).view(groups, atoms, 4, 2, 8, 4, 4, 2, 2).flip(-1)
    rows = split.permute(0, 2, 8, 4, 1, 3, 6, 5, 7).reshape(groups * TILE, atoms * TILE)
    return rows[:m, :k].contiguous().view(torch.float8_e4m3fn)


def linear_fp8_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in plain torch, in fp64, of the weight as it is before it is packed; never serves."""
    product = (x.double() @ weight.double().T) * scale.double()
    return (product if bias is None else product + bias.double()).to(x.dtype)
