# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding tables."""

from __future__ import annotations

import math

import torch

from dflash.checkpoints.config import RopeConfig


def cos_sin_cache(rope: RopeConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """cos and sin of every position.

    Args:
        rope: theta, rotary_dim and the scaling of the checkpoint.
        num_positions: rows of the table.

    Returns:
        [num_positions, rotary_dim] float32: cosines in the first half, sines in the second.
    """
    frequencies, attention_factor = _frequencies(rope)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies.float())
    table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
    return table.to(device).contiguous()


def _frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] and the factor on cos and sin."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    base = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "default":
        return base, 1.0
    if rope.rope_type == "linear":
        return base / rope.scaling["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(base, rope.scaling), 1.0
    if rope.rope_type == "yarn":
        return _yarn(base, rope)
    raise ValueError(
        f"rope_type {rope.rope_type!r} is not supported: expected default, linear, llama3 or yarn"
    )


def _llama3(base: torch.Tensor, scaling: dict) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    factor = scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * base / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return base * keep + base / factor * (1 - keep)


def _yarn(base: torch.Tensor, rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): by-parts interpolation and a temperature on the logits."""
    scaling = rope.scaling
    factor = scaling["factor"]
    length = scaling["original_max_position_embeddings"]

    def dimension_of(turns: float) -> float:
        ratio = length / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    span = max(high - low, 0.001)
    ramp = ((torch.arange(len(base), dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    frequencies = base / factor * ramp + base * (1 - ramp)
    return frequencies, _yarn_attention_factor(scaling)


def _yarn_attention_factor(scaling: dict) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    factor = scaling["factor"]
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)
