# SPDX-License-Identifier: Apache-2.0
"""The weights of a target and of a drafter, fused the way the models use them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerWeights:
    input_layernorm: torch.Tensor  # [H]
    qkv_proj: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, H]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o_proj: torch.Tensor  # [H, num_heads * head_dim]
    o_bias: torch.Tensor | None  # [H]
    post_attention_layernorm: torch.Tensor  # [H]
    gate_up_proj: torch.Tensor  # [2 * I, H], gate first
    down_proj: torch.Tensor  # [H, I]
    sinks: torch.Tensor | None = None  # [num_heads]


@dataclass(frozen=True)
class TargetWeights:
    embed_tokens: torch.Tensor  # [V, H]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    lm_head: torch.Tensor  # [V, H]; the same tensor as embed_tokens when tied


@dataclass(frozen=True)
class DraftWeights:
    fc: torch.Tensor  # [H, num_taps * H_target]
    hidden_norm: torch.Tensor | None  # [H]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [H]
    embed_tokens: torch.Tensor | None  # [V, H], or None: the target's
    lm_head: torch.Tensor | None  # [V or draft_vocab_size, H], or None: the target's
    d2t: torch.Tensor | None  # int64 [draft_vocab_size]: target id = k + d2t[k]
    mask_embedding: torch.Tensor | None  # [H]: replaces the mask token's embedding row
