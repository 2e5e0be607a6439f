# SPDX-License-Identifier: Apache-2.0
"""Rotary settings: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.checkpoints.config import RopeConfig
from dflash.checkpoints.fields import read_bool, read_dict, read_float, read_int
from dflash.errors import CheckpointError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def parse_rope(
    config: Mapping, head_dim: int, *, default_theta: float | None, is_neox: bool = True
) -> RopeConfig:
    """Reads the rotary settings of a config.

    Args:
        default_theta: base when the config names none; None makes that an error.

    Raises:
        CheckpointError: a missing or ill-typed key, or a type that is not built.
    """
    parameters = _parameters(config)
    theta = read_float(parameters, "rope_theta", read_float(config, "rope_theta", default_theta))
    if theta is None or theta <= 0:
        raise CheckpointError(f"config key 'rope_theta' must be a positive number, got {theta!r}")
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(
            f"rope type '{rope_type}' is not supported: expected one of "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if parameters.get("mrope_section"):
        raise CheckpointError("multimodal RoPE (mrope_section) is not supported")
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        scaling=_scaling(rope_type, parameters, config),
        rotary_dim=_rotary_dim(config, parameters, head_dim),
        is_neox=is_neox,
    )


def _parameters(config: Mapping) -> dict[str, Any]:
    """The one dict of settings; transformers prefers `rope_scaling` where a config has both."""
    parameters = read_dict(config, "rope_scaling") or read_dict(config, "rope_parameters")
    if not parameters or not all(isinstance(value, dict) for value in parameters.values()):
        return parameters
    kinds = list(parameters.values())
    if any(kind != kinds[0] for kind in kinds):
        raise CheckpointError(
            f"RoPE that differs between layer types ({', '.join(parameters)}) is not supported"
        )
    return kinds[0]


def _rotary_dim(config: Mapping, parameters: dict[str, Any], head_dim: int) -> int:
    key = "partial_rotary_factor"
    fraction = read_float(parameters, key, read_float(config, key, 1.0))
    rotary_dim = int(head_dim * fraction)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"config key '{key}' = {fraction} gives {rotary_dim} rotary dimensions of a head of "
            f"{head_dim}: expected an even number from 2 to {head_dim}"
        )
    return rotary_dim


def _scaling(rope_type: str, parameters: dict[str, Any], config: Mapping) -> dict[str, Any]:
    scaling: dict[str, Any] = {key: read_float(parameters, key) for key in _KEYS[rope_type]}
    if scaling.get("factor", 1.0) <= 0:
        raise CheckpointError(f"config key 'factor' must be positive, got {scaling['factor']}")
    if rope_type not in ("llama3", "yarn"):
        return scaling
    key = "original_max_position_embeddings"
    fallback = read_int(config, "max_position_embeddings")
    scaling[key] = read_int(config, key, read_int(parameters, key, fallback))
    if rope_type == "yarn":
        options = {name: read_float(parameters, name, None) for name in _YARN_OPTIONS}
        scaling.update({name: value for name, value in options.items() if value is not None})
        scaling["truncate"] = read_bool(parameters, "truncate", True)
    return scaling
