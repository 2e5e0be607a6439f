# SPDX-License-Identifier: Apache-2.0
"""The configurations of a pair without its weights."""

from __future__ import annotations

from pathlib import Path

from dflash.checkpoints.config import DraftConfig, TargetConfig
from dflash.checkpoints.demo import demo_draft, demo_target
from dflash.checkpoints.drafts import parse_draft_config
from dflash.checkpoints.gguf import gguf_config
from dflash.checkpoints.reader import read_json
from dflash.checkpoints.resolve import resolve_configs
from dflash.checkpoints.targets import parse_target_config
from dflash.errors import CheckpointError


def read_target_config(name: str | Path) -> TargetConfig:
    """A target's; errors as load_target's."""
    found = resolve_configs(name, demo_target)
    raw = gguf_config(found) if found.is_file() else read_json(found / "config.json")
    try:
        return parse_target_config(raw)
    except CheckpointError as error:
        raise CheckpointError(f"{found}: {error}") from None


def read_draft_config(name: str | Path) -> DraftConfig:
    """A drafter's; errors as load_draft's."""
    found = resolve_configs(name, demo_draft)
    if found.is_file():
        raise CheckpointError(f"{found}: a drafter in GGUF is not supported: give its directory")
    try:
        return parse_draft_config(read_json(found / "config.json"))
    except CheckpointError as error:
        raise CheckpointError(f"{found}: {error}") from None
