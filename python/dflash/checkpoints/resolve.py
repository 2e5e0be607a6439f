# SPDX-License-Identifier: Apache-2.0
"""From what the user wrote (a path, "demo", a hub id) to a checkpoint directory on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from dflash.checkpoints.cache import NO_SPACE
from dflash.errors import CheckpointError, DflashError

DEMO_MODEL = "demo"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "mask_embedding.pt",
)
_HUB_UNUSED = ("*/*", "consolidated*")
_HUB_CONFIGS = ("config.json", "generation_config.json")


def resolve_target(name: str | Path) -> Path:
    """A directory with config.json, safetensors and tokenizer; a GGUF is converted into the cache.

    Raises:
        CheckpointError: nothing of that name, or not a checkpoint.
        DflashError: network or disk.
    """
    from dflash.checkpoints.demo import demo_target
    from dflash.checkpoints.gguf import convert_gguf

    found = _resolve(name)
    if found is None:
        return demo_target()
    if found.is_file():
        return convert_gguf(found)
    gguf = None if (found / "config.json").exists() else _only_gguf(found)
    return found if gguf is None else convert_gguf(gguf)


def resolve_draft(name: str | Path) -> Path:
    """A drafter's directory; errors as resolve_target's. Drafters in GGUF are refused."""
    from dflash.checkpoints.demo import demo_draft

    found = _resolve(name)
    if found is None:
        return demo_draft()
    if found.is_file():
        raise CheckpointError(f"{found}: a drafter in GGUF is not supported: give its directory")
    return found


def resolve_configs(name: str | Path, demo: Callable[[], Path]) -> Path:
    """A directory with config.json, or a GGUF file: of a hub id nothing else is fetched.

    Errors as resolve_target's.
    """
    found = _resolve(name, _HUB_CONFIGS)
    if found is None:
        return demo()
    if found.is_dir() and not (found / "config.json").exists():
        return _only_gguf(found) or found
    return found


def _resolve(name: str | Path, hub_files: tuple[str, ...] = _HUB_FILES) -> Path | None:
    """An existing directory or .gguf file, None for the demo, else a snapshot of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"no such file: {path}")
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file: expected a checkpoint directory or a .gguf file")
    if str(name) == DEMO_MODEL:
        return None
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise CheckpointError(
            f"no such directory: {name} (expected a checkpoint directory, a .gguf file, "
            f'"{DEMO_MODEL}" or a hub id like Qwen/Qwen3-8B)'
        )
    return _download(name, hub_files)


def _only_gguf(directory: Path) -> Path | None:
    files = sorted(path for path in directory.iterdir() if path.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds several GGUF files: give one of "
            f"{', '.join(file.name for file in files)}"
        )
    return files[0] if files else None


def _download(repo: str, files: tuple[str, ...]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        path = huggingface_hub.snapshot_download(
            repo, allow_patterns=list(files), ignore_patterns=list(_HUB_UNUSED)
        )
    except errors.GatedRepoError as error:
        raise DflashError(
            f"{repo} is gated: accept its terms on the hub and log in (`hf auth login`)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"no such directory, and no such repository on the hub (or it is private): {repo}"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise DflashError(
            f"{repo} is not in the local hub cache, and the hub cannot be reached: check the "
            "network (and HF_HUB_OFFLINE), or give a checkpoint directory"
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise DflashError(
                f"the disk is full while downloading {repo}: free some space, or set HF_HOME to a "
                "folder on another disk"
            ) from error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DflashError(f"cannot download {repo} from the hub: {reason[0]}") from error
    return Path(path)
