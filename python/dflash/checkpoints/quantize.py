# SPDX-License-Identifier: Apache-2.0
"""A drafter's large matrices in fp8, made at load: its drafts change a little, the answers do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from dflash.checkpoints.config import DraftConfig, TargetConfig
from dflash.checkpoints.matrix import Fp8Matrix, Matrix
from dflash.checkpoints.pair import check_pair
from dflash.checkpoints.weights import DraftWeights, LayerWeights, TargetWeights, load_draft
from dflash.errors import CheckpointError
from dflash.log import log_once
from dflash.ops.linear_fp8 import TILE, fp8_is_streamed, pack_fp8, quantize_fp8
from dflash.ops.linear_silu_mul_fp8 import TURN, in_turns

PART_BYTES = 16 << 20
"""Of fp32 copies alive at once: an allocator would hold on to larger ones, of which fp8 takes a corner."""


def load_draft_of(
    target: tuple[TargetConfig, TargetWeights],
    path: str | Path,
    quantization: str | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[DraftConfig, DraftWeights]:
    """The drafter of a target, its matrices in fp8 where that is asked for.

    Raises:
        CheckpointError: it does not belong to the target.
    """
    target_config, target_weights = target
    config, weights, _ = load_draft(path, dtype, device, target_weights)
    check_pair(target_config, config, weights)
    if quantization is None:
        return config, weights
    weights = quantize_draft(config, weights)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the matrices as they were loaded, which nobody has any more
    return config, weights


def quantize_draft(config: DraftConfig, weights: DraftWeights) -> DraftWeights:
    """The drafter with fc and every layer's four matrices as float8_e4m3fn, a scale an output.

    Norms, biases, an embedding and a head of its own keep their dtype, and so do the K and V rows
    that make context K/V, which `kv_proj` keeps aside. Says once where it does not pay.
    """
    query_size = config.decoder.num_heads * config.decoder.head_dim
    kv_proj = torch.cat([_whole(layer.qkv_proj)[query_size:] for layer in weights.layers])
    quantized = replace(
        weights,
        fc=_quantized("fc", weights.fc),
        layers=[_quantized_layer(i, layer) for i, layer in enumerate(weights.layers)],
        kv_proj=kv_proj,
    )
    if kv_proj.is_cuda:
        _say_what_is_unpacked(quantized, kv_proj.dtype)
    else:
        log_once(
            "draft_quantization: on a CPU drafts take longer with it, weights are widened at every product"
        )
    return quantized


def _quantized_layer(i: int, layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        qkv_proj=_quantized(f"layer {i}'s qkv_proj", layer.qkv_proj),
        o_proj=_quantized(f"layer {i}'s o_proj", layer.o_proj),
        gate_up_proj=_quantized_gate_up(f"layer {i}'s gate_up_proj", layer.gate_up_proj),
        down_proj=_quantized(f"layer {i}'s down_proj", layer.down_proj),
    )


def _whole(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "a drafter's matrices are loaded as one tensor each"
    return matrix


def _quantized(name: str, matrix: Matrix) -> Fp8Matrix:
    whole = _whole(matrix)
    return _packed(name, whole, whole.split(_part_rows(whole)))


def _quantized_gate_up(name: str, matrix: Matrix) -> Fp8Matrix:
    gate_up = _whole(matrix)
    # Where a GPU unpacks the weight, silu_mul wants rows longer than a turn.
    is_unpacked = gate_up.is_cuda and not fp8_is_streamed(gate_up)
    if is_unpacked or gate_up.shape[0] % (2 * TURN) != 0:
        return _quantized(name, gate_up)
    halves = (half.split(_part_rows(gate_up) // 2) for half in gate_up.chunk(2))
    parts = (in_turns(torch.cat(pair)) for pair in zip(*halves, strict=True))
    return replace(_packed(name, gate_up, parts), in_turns=True)


def _part_rows(matrix: torch.Tensor) -> int:
    return max(1, PART_BYTES // (4 * TILE * matrix.shape[1])) * TILE


def _packed(name: str, matrix: torch.Tensor, parts: Iterable[torch.Tensor]) -> Fp8Matrix:
    """`parts` have the rows of the matrix, all but the last whole tiles of them."""
    outputs, size = matrix.shape
    shape = (-(-outputs // TILE), -(-size // TILE), TILE * TILE)
    weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scale = torch.empty(outputs, device=matrix.device)
    first = 0
    for part in parts:
        rounded, scale[first : first + len(part)] = quantize_fp8(part)
        tiles = pack_fp8(rounded)
        weight[first // TILE :][: len(tiles)].copy_(tiles)
        first += len(part)
    if not bool(torch.isfinite(scale).all()):
        raise CheckpointError(
            f"the drafter's {name} holds NaN or infinity in {str(matrix.dtype).removeprefix('torch.')}, which fp8 "
            "cannot scale: use another dtype or checkpoint, or no draft_quantization"
        )
    return Fp8Matrix(weight, scale, is_streamed=fp8_is_streamed(matrix))


def _say_what_is_unpacked(weights: DraftWeights, dtype: torch.dtype) -> None:
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    matrices = {"fc": weights.fc}
    matrices |= {name: getattr(layer, name) for layer in weights.layers for name in names}
    missing = [
        name for name, m in matrices.items() if isinstance(m, Fp8Matrix) and not m.is_streamed
    ]
    if missing:
        log_once(
            f"draft_quantization: {', '.join(missing)} in {str(dtype).removeprefix('torch.')} are not streamed: that "
            "takes sm_90, a 16-bit dtype and rows that are whole 16-byte words; they are unpacked at every product "
            "for the library's GEMM, which takes longer than 16-bit weights do"
        )
