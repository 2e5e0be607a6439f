# SPDX-License-Identifier: Apache-2.0
"""A drafter's large matrices in fp8, made at load: its drafts change a little, the answers do not."""

from __future__ import annotations

from dataclasses import replace

import torch

from dflash.checkpoints.config import DraftConfig
from dflash.checkpoints.weights import DraftWeights, Fp8Matrix, LayerWeights, Matrix
from dflash.ops.linear_fp8 import pack_fp8, quantize_fp8
from dflash.ops.linear_silu_mul_fp8 import TURN, in_turns


def quantize_draft(config: DraftConfig, weights: DraftWeights) -> DraftWeights:
    """The drafter with fc and every layer's four matrices as float8_e4m3fn, a scale an output.

    Norms, biases, an embedding and a head of its own keep their dtype, and so do the K and V rows that make context
    K/V, which `kv_proj` keeps aside. What is no longer referenced is given back to the device.
    """
    query_size = config.decoder.num_heads * config.decoder.head_dim
    kv_proj = torch.cat([_whole(layer.qkv_proj)[query_size:] for layer in weights.layers])
    quantized = replace(
        weights,
        fc=_quantized(weights.fc),
        layers=[_quantized_layer(layer) for layer in weights.layers],
        kv_proj=kv_proj,
    )
    if kv_proj.is_cuda:
        torch.cuda.empty_cache()  # of the fp32 copies
    return quantized


def _quantized_layer(layer: LayerWeights) -> LayerWeights:
    return replace(
        layer,
        qkv_proj=_quantized(layer.qkv_proj),
        o_proj=_quantized(layer.o_proj),
        gate_up_proj=_quantized_gate_up(layer.gate_up_proj),
        down_proj=_quantized(layer.down_proj),
    )


def _whole(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "a drafter's matrices are loaded as one tensor each"
    return matrix


def _quantized(matrix: Matrix) -> Fp8Matrix:
    rounded, scale = quantize_fp8(_whole(matrix))
    return Fp8Matrix(pack_fp8(rounded), scale)


def _quantized_gate_up(matrix: Matrix) -> Fp8Matrix:
    gate_up = _whole(matrix)
    if gate_up.shape[0] % (2 * TURN) != 0:
        return _quantized(gate_up)
    return replace(_quantized(in_turns(gate_up)), in_turns=True)
