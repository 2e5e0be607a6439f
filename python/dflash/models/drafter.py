# SPDX-License-Identifier: Apache-2.0
"""The block-diffusion drafter: context K/V from the target's taps, one pass over [bonus, mask x N]."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from dflash.attention.spec import AttentionBatch
from dflash.checkpoints.config import DraftConfig
from dflash.checkpoints.matrix import Matrix
from dflash.checkpoints.weights import DraftWeights
from dflash.log import log_once
from dflash.models.decoder import Decoder, DecoderSettings
from dflash.models.linear import linear, logits_dtype
from dflash.ops.precompute_context_kv import precompute_context_kv


class Drafter:
    """Shares the target's embedding and head unless its checkpoint ships its own."""

    def __init__(
        self,
        config: DraftConfig,
        weights: DraftWeights,
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
        settings: DecoderSettings,
    ) -> None:
        self.config = config
        self.fc = weights.fc
        self.hidden_norm = weights.hidden_norm
        self.embed_tokens = embed_tokens if weights.embed_tokens is None else weights.embed_tokens
        self.lm_head = lm_head if weights.lm_head is None else weights.lm_head
        self.mask_embedding = weights.mask_embedding
        self.d2t = weights.d2t
        settings = replace(settings, query_shape="uniform")
        self.decoder = Decoder(
            config.decoder, weights.layers, weights.norm, settings, config.value_scale
        )
        kv_weight = weights.kv_proj
        if kv_weight is None:
            kv_weight = torch.cat([self._kv_rows(layer.qkv_proj) for layer in weights.layers])
        self.kv_weight = kv_weight
        if self.kv_weight.is_cuda and config.decoder.head_dim not in (64, 128):
            log_once(
                f"context K/V: heads of {config.decoder.head_dim} take a GEMM and a kernel that stores, those of 64 "
                "and 128 one kernel for few rows"
            )
        self.kv_bias = self._stack([layer.qkv_bias for layer in weights.layers], self._kv_rows)
        self.k_norms = self._stack([layer.k_norm for layer in weights.layers], lambda w: w[None])

    def _kv_rows(self, qkv: Matrix) -> torch.Tensor:
        assert isinstance(qkv, torch.Tensor)
        return qkv[self.config.decoder.num_heads * self.config.decoder.head_dim :]

    @staticmethod
    def _stack(tensors: list[Matrix | None], rows_of) -> torch.Tensor | None:
        present = [rows_of(t) for t in tensors if t is not None]
        return torch.cat(present) if present else None

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """Context features [T, H], un-normed, of the taps [T, n * H_target]."""
        return linear(taps, self.fc)

    def store_context(
        self, features: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Every layer's K/V of the features, at their own positions; slot -1 stores nothing."""
        config = self.config.decoder
        precompute_context_kv(
            features,
            hidden_norm_weight=self.hidden_norm,
            rms_norm_eps=config.rms_norm_eps,
            kv_weight=self.kv_weight,
            kv_bias=self.kv_bias,
            k_norm_weight=self.k_norms,
            cos_sin_cache=self.decoder.rope_table,
            is_neox=config.rope.is_neox,
            positions=positions,
            slot_mappings=[slot_mapping],
            layer_groups=[0] * config.num_layers,
            value_scale=self.config.value_scale,
            k_scales=self.decoder.cache_scales,
            v_scales=self.decoder.cache_scales,
            key_caches=[cache.key for cache in self.decoder.caches],
            value_caches=[cache.value for cache in self.decoder.caches],
        )

    def forward(self, input_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Hidden states [R * Q, H] after the final norm, of the query ids."""
        return self.decoder.forward(self._embed(input_ids), batch)

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded = F.embedding(input_ids, self.embed_tokens)
        if self.mask_embedding is not None:
            is_mask = (input_ids == self.config.mask_token_id)[:, None]
            embedded = torch.where(is_mask, self.mask_embedding, embedded)
        if self.config.embedding_scale != 1.0:
            embedded = embedded * self.config.embedding_scale
        return embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, V_draft], before logit_scale, of models.linear.logits_dtype."""
        shape = hidden.shape[0], self.lm_head.shape[0]
        output = hidden.new_empty(shape, dtype=logits_dtype(self.lm_head))
        return linear(hidden, self.lm_head, output=output)
