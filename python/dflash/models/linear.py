# SPDX-License-Identifier: Apache-2.0
"""The one seam every matrix of the target and the drafter goes through."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dflash.log import log_once
from dflash.ops import linear as op
from dflash.ops import linear_silu_mul as fused_op

STRICT_ROWS = 128
"""Rows of every GEMM of a strict target: as many as cost little more than one."""


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile_rows: int | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [M, K]^T + bias [M], into `output` [T, M] where it is given.

    With tile_rows, T a multiple of it, every row goes through a GEMM of exactly that many rows: its bits do not depend
    on T, which otherwise chooses the library's kernel.
    """
    if output is None:
        output = x.new_empty(x.shape[0], weight.shape[0])
    for rows, out in _tiles(x, output, tile_rows):
        op.linear(rows, weight, bias, out)
    return output


def linear_silu_mul(
    x: torch.Tensor, weight: torch.Tensor, tile_rows: int | None = None
) -> torch.Tensor:
    """silu(gate) * up [T, I] of [gate, up] = x [T, K] @ weight [2 * I, K]^T; tile_rows as in `linear`."""
    output = x.new_empty(x.shape[0], weight.shape[0] // 2)
    for rows, out in _tiles(x, output, tile_rows):
        fused_op.linear_silu_mul(rows, weight, out)
    return output


def _tiles(
    x: torch.Tensor, output: torch.Tensor, tile_rows: int | None
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if tile_rows is None or x.shape[0] == tile_rows:
        return ((x, output),)
    assert x.shape[0] % tile_rows == 0, f"{x.shape[0]} rows do not divide into tiles of {tile_rows}"
    return zip(x.split(tile_rows), output.split(tile_rows), strict=True)


def log_unstreamed(weights: Iterable[torch.Tensor]) -> None:
    """Says once, of each shape, that a 16-bit matrix on a GPU goes through the library's GEMM at any number of rows."""
    for weight in weights:
        if not weight.is_cuda or weight.dtype == torch.float32:
            continue
        if op.linear_plan(weight[:1], weight) is None:
            log_once(
                f"linear: weights {list(weight.shape)} are not streamed: that takes sm_90 and rows that are whole, "
                "aligned 16-byte words; the library's GEMM serves"
            )


__all__ = ["STRICT_ROWS", "linear", "linear_silu_mul", "log_unstreamed"]
