# SPDX-License-Identifier: Apache-2.0
"""Typed reads from a config.json: an absent or ill-typed key is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dflash.errors import CheckpointError

REQUIRED = object()

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def read_int(config: Mapping, key: str, default: Any = REQUIRED, minimum: int = 1) -> Any:
    """An integer >= minimum; null counts as absent."""
    value = _present(config, key, default)
    if value is default:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(f"config key '{key}' must be an integer >= {minimum}, got {value!r}")
    return value


def read_float(config: Mapping, key: str, default: Any = REQUIRED) -> Any:
    value = _present(config, key, default)
    if value is default:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"config key '{key}' must be a finite number, got {value!r}")
    return float(value)


def read_bool(config: Mapping, key: str, default: bool | None) -> bool | None:
    value = _present(config, key, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config key '{key}' must be true or false, got {value!r}")
    return value


def read_dict(config: Mapping, key: str) -> dict[str, Any]:
    value = _present(config, key, None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"config key '{key}' must be an object, got {value!r}")
    return value


def read_ids(config: Mapping, key: str) -> tuple[int, ...] | None:
    """A list of integers >= 0, or None when absent."""
    value = _present(config, key, None)
    if value is None:
        return None
    whole = isinstance(value, list | tuple) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )
    if not whole or not value:
        raise CheckpointError(
            f"config key '{key}' must be a non-empty list of integers >= 0, got {value!r}"
        )
    return tuple(value)


def read_eos_ids(config: Mapping) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    if isinstance(value, int):
        value = [value]
    return read_ids({"eos_token_id": value}, "eos_token_id") or ()


def read_dtype(config: Mapping) -> torch.dtype:
    """`dtype` (transformers 5) or `torch_dtype` (4); float32 when neither is there."""
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(name).removeprefix("torch.")
    if name not in _DTYPES:
        raise CheckpointError(
            f"config dtype '{name}' is not supported: expected one of {', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def read_architecture(config: Mapping) -> str:
    """The one name in `architectures`, or '' when the config has none."""
    names = config.get("architectures") or [""]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"config key 'architectures' must list one name, got {names!r}")
    return names[0]


def read_layer_types(config: Mapping, num_layers: int) -> tuple[str, ...] | None:
    value = config.get("layer_types")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_layers:
        raise CheckpointError(
            f"config key 'layer_types' must name num_hidden_layers = {num_layers}, got {value!r}"
        )
    other = sorted({str(kind) for kind in value} - {"full_attention", "sliding_attention"})
    if other:
        raise CheckpointError(
            f"layer type {', '.join(other)} is not supported: expected full_attention or "
            "sliding_attention"
        )
    return tuple(value)


def refuse(config: Mapping, keys: Iterable[str], reason: str) -> None:
    """Refuses keys that change what the model computes, unless they are off."""
    for key in keys:
        value = config.get(key)
        if value and not (isinstance(value, float) and value == 1.0):
            raise CheckpointError(f"config key '{key}' = {value!r} is not supported: {reason}")


def _present(config: Mapping, key: str, default: Any) -> Any:
    value = config.get(key)
    if value is not None:
        return value
    if default is REQUIRED:
        raise CheckpointError(f"config key '{key}' is missing")
    return default
