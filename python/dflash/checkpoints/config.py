# SPDX-License-Identifier: Apache-2.0
"""One normalised configuration for every checkpoint dflash reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: everything the cos/sin table is built from."""

    theta: float
    rope_type: str  # default, linear, llama3, yarn
    scaling: dict[str, Any] = field(default_factory=dict)  # the type's own keys, defaults filled in
    rotary_dim: int = 0  # leading dimensions of a head that rotate; < head_dim is partial
    is_neox: bool = True  # rotate halves; False: interleaved pairs


@dataclass(frozen=True)
class LayerAttention:
    """A query at q sees key k iff |q - k| < window, and k <= q when causal."""

    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class DecoderConfig:
    """A stack of pre-norm SwiGLU decoder layers: the target's and the drafter's alike."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    layers: tuple[LayerAttention, ...]


@dataclass(frozen=True)
class TargetConfig:
    """A target: its decoder, and the dtype its weights are in."""

    architecture: str
    decoder: DecoderConfig
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class DraftConfig:
    """A drafter: its decoder, the taps it reads and the block it fills."""

    dialect: Literal["dflash", "speculators"]
    decoder: DecoderConfig
    target_layer_ids: tuple[int, ...]  # entry i: the output of target layer i, in fc's column order
    target_hidden_size: int
    num_target_layers: int | None
    mask_token_id: int
    draft_block_size: int
    draft_vocab_size: int | None  # rows of a reduced head (d2t maps them), or None
    logit_scale: float
    embedding_scale: float
    value_scale: float
    has_sinks: bool
    dtype: torch.dtype
