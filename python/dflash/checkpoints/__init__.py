# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: find one, read it, normalise its configuration, fuse its weights."""

from dflash.checkpoints.config import (
    DecoderConfig,
    DraftConfig,
    LayerAttention,
    RopeConfig,
    TargetConfig,
)
from dflash.checkpoints.drafts import SUPPORTED_DRAFTERS, parse_draft_config
from dflash.checkpoints.pair import check_pair
from dflash.checkpoints.resolve import DEMO_MODEL, resolve_draft, resolve_target
from dflash.checkpoints.targets import SUPPORTED_TARGETS, parse_target_config
from dflash.checkpoints.weights import (
    DraftWeights,
    LayerWeights,
    TargetWeights,
    load_draft,
    load_target,
)

__all__ = [
    "DEMO_MODEL",
    "SUPPORTED_DRAFTERS",
    "SUPPORTED_TARGETS",
    "DecoderConfig",
    "DraftConfig",
    "DraftWeights",
    "LayerAttention",
    "LayerWeights",
    "RopeConfig",
    "TargetConfig",
    "TargetWeights",
    "check_pair",
    "load_draft",
    "load_target",
    "parse_draft_config",
    "parse_target_config",
    "resolve_draft",
    "resolve_target",
]
