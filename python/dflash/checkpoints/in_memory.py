# SPDX-License-Identifier: Apache-2.0
"""A transformers model that its owner holds in memory, as a target: its own tensors, none of them copied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dflash.checkpoints.config import TargetConfig
from dflash.checkpoints.layout import canonical_names, check_layout, target_layout
from dflash.checkpoints.matrix import Matrix
from dflash.checkpoints.targets import parse_target_config
from dflash.checkpoints.weights import Loader, TargetWeights
from dflash.errors import CheckpointError


def adopt_target(model: Any) -> tuple[TargetConfig, TargetWeights]:
    """The configuration and the weights of an AutoModelForCausalLM of a supported family.

    Args:
        model: whole on one device, in one of float32, float16 and bfloat16. Later changes of its parameters in place
            are seen; parameters that are replaced (`model.to`) are not.

    Raises:
        CheckpointError: an architecture, config, layer or placement that cannot be served, named.
    """
    name = type(model).__name__
    raw = model.config.to_dict() | {"architectures": [name]}
    config = parse_target_config(raw, model.generation_config.to_dict())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _check_placement(name, model, parameters)
    names = canonical_names(parameters)
    shapes = {stored: tuple(parameter.shape) for stored, parameter in parameters.items()}
    check_layout(name, target_layout(config), shapes, names)
    loader = _Adopter(parameters, names)
    embed_tokens = loader.one("embed_tokens.weight")
    tied = "lm_head.weight" not in names
    weights = TargetWeights(
        embed_tokens=embed_tokens,
        layers=loader.layers(config.decoder),
        norm=loader.one("norm.weight"),
        lm_head=embed_tokens if tied else loader.one("lm_head.weight"),
    )
    return replace(config, dtype=embed_tokens.dtype), weights


class _Adopter(Loader):
    """Takes parameters where they are; what others stack stays apart."""

    def __init__(self, parameters: dict[str, nn.Parameter], names: dict[str, str]) -> None:
        self.names = names
        self._parameters = parameters

    def one(self, name: str) -> torch.Tensor:
        return self._parameters[self.names[name]].detach()

    def stacked(self, *names: str) -> Matrix:
        return tuple(self.one(name) for name in names)


def _expected_kind(path: str, module: nn.Module) -> str | None:
    """What a module with weights has to be, where it is something else: a subclass may compute something else."""
    if path.endswith(("_proj", "lm_head")):
        return None if type(module) is nn.Linear else "nn.Linear"
    if path.endswith("embed_tokens"):
        return None if type(module) is nn.Embedding else "nn.Embedding"
    kind = type(module)
    is_norm = kind.__name__.endswith("RMSNorm") and kind.__module__.startswith("transformers.")
    return None if is_norm else "RMSNorm of transformers"


def _check_placement(name: str, model: Any, parameters: dict[str, nn.Parameter]) -> None:
    for path, module in model.named_modules():
        has_weights = next(module.parameters(recurse=False), None) is not None
        known = path.endswith(("_proj", "lm_head", "embed_tokens", "norm"))
        expected = _expected_kind(path, module) if has_weights or known else None
        if expected is not None:
            kind = type(module).__name__
            raise CheckpointError(f"{name}: {path} is a {kind}: expected a plain {expected}")
    places = sorted({str(p.device) for p in parameters.values()})
    if len(places) != 1 or places == ["meta"]:
        raise CheckpointError(
            f"{name}: its parameters are on {', '.join(places)}: expected one device"
        )
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters.values()})
    if len(dtypes) != 1 or dtypes[0] not in ("float32", "float16", "bfloat16"):
        raise CheckpointError(
            f"{name}: its parameters are {', '.join(dtypes)}: expected float32, float16 or bfloat16, one for all"
        )
