# SPDX-License-Identifier: Apache-2.0
"""The one seam every matrix of the target and the drafter goes through."""

from __future__ import annotations

import torch

from dflash.checkpoints.weights import Matrix
from dflash.ops import linear as op

STRICT_ROWS = 128
"""Rows of every GEMM of a strict target: as many as cost little more than one."""


def linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: Matrix | None = None,
    tile_rows: int | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [M, K]^T + bias [M], into `output` [T, M] where it is given.

    Several matrices are several GEMMs into columns of one output: they stay where they are.

    With tile_rows, T a multiple of it, every row goes through a GEMM of exactly that many rows: its bits do not depend
    on T, which otherwise chooses the library's kernel.
    """
    if isinstance(weight, tuple):
        assert bias is None or isinstance(bias, tuple)
        return _below_each_other(x, weight, bias, tile_rows, output)
    assert not isinstance(bias, tuple)
    if tile_rows is None or x.shape[0] == tile_rows:
        return op.linear(x, weight, bias, output)
    assert x.shape[0] % tile_rows == 0, f"{x.shape[0]} rows do not divide into tiles of {tile_rows}"
    if output is None:
        output = x.new_empty(x.shape[0], weight.shape[0])
    for rows, out in zip(x.split(tile_rows), output.split(tile_rows), strict=True):
        op.linear(rows, weight, bias, out)
    return output


def _below_each_other(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor, ...] | None,
    tile_rows: int | None,
    output: torch.Tensor | None,
) -> torch.Tensor:
    sizes = [weight.shape[0] for weight in weights]
    if output is None:
        output = x.new_empty(x.shape[0], sum(sizes))
    for i, columns in enumerate(output.split(sizes, dim=1)):
        linear(x, weights[i], biases[i] if biases else None, tile_rows, columns)
    return output


__all__ = ["STRICT_ROWS", "linear"]
