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
from dflash.checkpoints.targets import SUPPORTED_TARGETS, parse_target_config

__all__ = [
    "SUPPORTED_DRAFTERS",
    "SUPPORTED_TARGETS",
    "DecoderConfig",
    "DraftConfig",
    "LayerAttention",
    "RopeConfig",
    "TargetConfig",
    "parse_draft_config",
    "parse_target_config",
]
