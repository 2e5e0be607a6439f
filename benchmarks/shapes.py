# SPDX-License-Identifier: Apache-2.0
"""Model shapes with random weights, for timing and for tests that need no checkpoint."""

from __future__ import annotations

import torch

from dflash.checkpoints.config import (
    DecoderConfig,
    DraftConfig,
    LayerAttention,
    RopeConfig,
    TargetConfig,
)
from dflash.checkpoints.weights import DraftWeights, LayerWeights, TargetWeights


def qwen3_8b() -> TargetConfig:
    decoder = _qwen3_decoder(num_layers=36, causal=True)
    return TargetConfig("Qwen3ForCausalLM", decoder, False, (151645,), torch.bfloat16)


def qwen3_8b_draft() -> DraftConfig:
    """The five-layer, block-16 drafter published for Qwen3-8B."""
    return DraftConfig(
        dialect="dflash",
        decoder=_qwen3_decoder(num_layers=5, causal=False),
        target_layer_ids=(1, 9, 17, 25, 33),
        target_hidden_size=4096,
        num_target_layers=36,
        mask_token_id=151669,
        draft_block_size=16,
        draft_vocab_size=None,
        logit_scale=1.0,
        embedding_scale=1.0,
        value_scale=1.0,
        has_sinks=False,
        dtype=torch.bfloat16,
    )


def _qwen3_decoder(num_layers: int, causal: bool) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(theta=1e6, rope_type="default", rotary_dim=128),
        qk_norm=True,
        qkv_bias=False,
        o_bias=False,
        layers=(LayerAttention(causal, None),) * num_layers,
    )


class RandomWeights:
    """Normal weights scaled so that activations stay of order one; the same for one seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return weight.normal_(0.0, columns**-0.5, generator=self.generator)

    def norm(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def layer(self, c: DecoderConfig) -> LayerWeights:
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return LayerWeights(
            input_layernorm=self.norm(c.hidden_size),
            qkv_proj=self.matrix(q + 2 * kv, c.hidden_size),
            qkv_bias=None,
            q_norm=self.norm(c.head_dim) if c.qk_norm else None,
            k_norm=self.norm(c.head_dim) if c.qk_norm else None,
            o_proj=self.matrix(c.hidden_size, q),
            o_bias=None,
            post_attention_layernorm=self.norm(c.hidden_size),
            gate_up_proj=self.matrix(2 * c.intermediate_size, c.hidden_size),
            down_proj=self.matrix(c.hidden_size, c.intermediate_size),
        )

    def target(self, config: TargetConfig) -> TargetWeights:
        c = config.decoder
        embed = self.matrix(c.vocab_size, c.hidden_size)
        return TargetWeights(
            embed_tokens=embed,
            layers=[self.layer(c) for _ in range(c.num_layers)],
            norm=self.norm(c.hidden_size),
            lm_head=embed
            if config.tie_word_embeddings
            else self.matrix(c.vocab_size, c.hidden_size),
        )

    def draft(self, config: DraftConfig) -> DraftWeights:
        c = config.decoder
        taps = len(config.target_layer_ids) * config.target_hidden_size
        return DraftWeights(
            fc=self.matrix(c.hidden_size, taps),
            hidden_norm=self.norm(c.hidden_size),
            layers=[self.layer(c) for _ in range(c.num_layers)],
            norm=self.norm(c.hidden_size),
            embed_tokens=None,
            lm_head=None,
            d2t=None,
            mask_embedding=None,
        )


class UniformWeights(RandomWeights):
    """vLLM's dummy weights, norms included: on a GPU at its power limit the data moves the clock, so who is timed
    beside vLLM computes with the same distribution."""

    def matrix(self, rows: int, columns: int) -> torch.Tensor:
        return self._uniform(rows, columns)

    def norm(self, size: int) -> torch.Tensor:
        return self._uniform(size)

    def _uniform(self, *shape: int) -> torch.Tensor:
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        return weight.uniform_(-1e-3, 1e-3, generator=self.generator)


WEIGHTS = {"normal": RandomWeights, "uniform": UniformWeights}
