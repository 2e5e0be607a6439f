# SPDX-License-Identifier: Apache-2.0
"""The one seam every matrix of the target and the drafter goes through."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dflash.checkpoints.matrix import Fp8Matrix, Matrix
from dflash.log import log_once
from dflash.ops import linear as op
from dflash.ops import linear_fp8 as fp8_op
from dflash.ops import linear_silu_mul as fused_op
from dflash.ops import linear_silu_mul_fp8 as fused_fp8_op
from dflash.ops.lm_head_sample import lm_head_sample_plan
from dflash.ops.silu_mul import silu_mul

STRICT_ROWS = 128
"""Rows of every GEMM of a strict target, at most where they are streamed: as many as cost little more than one."""


def linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: Matrix | None = None,
    tile_rows: int | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [M, K]^T + bias [M], into `output` [T, M] where it is given.

    Several matrices are several GEMMs into columns of one output: they stay where they are.

    With tile_rows no GEMM has more rows than that. A row's bits then do not depend on T where the weight is streamed,
    or T a multiple of tile_rows; elsewhere T chooses the library's kernel. fp8 weights need no tiles.
    """
    assert not isinstance(bias, Fp8Matrix)
    if isinstance(weight, Fp8Matrix):
        assert not isinstance(bias, tuple) and not weight.in_turns
        return fp8_op.linear_fp8(x, weight.weight, weight.scale, bias, output)
    if isinstance(weight, tuple):
        assert bias is None or isinstance(bias, tuple)
        return _below_each_other(x, weight, bias, tile_rows, output)
    assert not isinstance(bias, tuple)
    if output is None:
        output = x.new_empty(x.shape[0], weight.shape[0])
    for rows, out in _tiles(x, output, tile_rows):
        op.linear(rows, weight, bias, out)
    return output


def linear_silu_mul(x: torch.Tensor, weight: Matrix, tile_rows: int | None = None) -> torch.Tensor:
    """silu(gate) * up [T, I] of [gate, up] = x [T, K] @ weight [2 * I, K]^T; the rest as in `linear`."""
    if isinstance(weight, Fp8Matrix) and weight.in_turns:
        return fused_fp8_op.linear_silu_mul_fp8(x, weight.weight, weight.scale)
    if not isinstance(weight, torch.Tensor):
        return silu_mul(linear(x, weight, None, tile_rows))
    output = x.new_empty(x.shape[0], weight.shape[0] // 2)
    for rows, out in _tiles(x, output, tile_rows):
        fused_op.linear_silu_mul(rows, weight, out)
    return output


def is_streamed(matrix: Matrix) -> bool:
    """Whether up to 128 rows stream the weight on a GPU, a row with bits of its own. Says once where it does not."""
    if isinstance(matrix, Fp8Matrix):
        return matrix.is_streamed
    weights = matrix if isinstance(matrix, tuple) else (matrix,)
    missing = [weight for weight in weights if op.linear_plan(weight[:1], weight) is None]
    for weight in missing:
        if weight.is_cuda and weight.dtype != torch.float32:
            log_once(
                f"linear: weights {list(weight.shape)} are not streamed: that takes sm_90 and rows that are "
                "whole, aligned 16-byte words; the library's GEMM serves"
            )
    return not missing


def logits_dtype(head: torch.Tensor) -> torch.dtype:
    """Of logits: where the head may sample itself the sums as they are. Up to 128 rows, and in strict, tokens are then
    the same either way; of more the library adds up in an order of its own.

    Where it may not, says so once on a GPU.
    """
    if lm_head_sample_plan(head[:1], head) is not None:
        return torch.float32
    if head.is_cuda and head.dtype != torch.float32:
        log_once(
            f"head {list(head.shape)}: its GEMM does not sample (that takes sm_90, more than 8448 tokens and aligned "
            "rows); logits are made"
        )
    return head.dtype


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


def _tiles(
    x: torch.Tensor, output: torch.Tensor, tile_rows: int | None
) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if tile_rows is None or x.shape[0] <= tile_rows:
        return ((x, output),)
    return zip(x.split(tile_rows), output.split(tile_rows), strict=True)


__all__ = [
    "STRICT_ROWS",
    "is_streamed",
    "linear",
    "linear_silu_mul",
    "logits_dtype",
]
