# SPDX-License-Identifier: Apache-2.0
"""A drafter's large matrices in fp8, made at load: its drafts change a little, the answers do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from dflash.checkpoints.config import DraftConfig
from dflash.checkpoints.weights import DraftWeights, Fp8Matrix, LayerWeights, Matrix
from dflash.ops.linear_fp8 import pack_fp8, quantize_fp8


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
        layers=[_with_matrices(layer, _quantized) for layer in weights.layers],
        kv_proj=kv_proj,
    )
    if kv_proj.is_cuda:
        torch.cuda.empty_cache()  # of the fp32 copies
    return quantized


def _with_matrices(layer: LayerWeights, convert: Callable[[Matrix], Matrix]) -> LayerWeights:
    return replace(
        layer,
        qkv_proj=convert(layer.qkv_proj),
        o_proj=convert(layer.o_proj),
        gate_up_proj=convert(layer.gate_up_proj),
        down_proj=convert(layer.down_proj),
    )


def _whole(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "a drafter's matrices are loaded as one tensor each"
    return matrix


def _quantized(matrix: Matrix) -> Fp8Matrix:
    rounded, scale = quantize_fp8(_whole(matrix))
    return Fp8Matrix(pack_fp8(rounded), scale)
