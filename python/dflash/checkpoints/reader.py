# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint directory: json, safetensors as mapped tensors, never a pickle."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from safetensors import SafetensorError, safe_open

from dflash.errors import CheckpointError, DflashError

_FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
_INTEGERS = {"I64": 8, "I32": 4}


def read_json(path: Path) -> dict[str, Any]:
    """A json object from a file.

    Raises:
        CheckpointError: the file is absent or is no json object.
        DflashError: it cannot be read.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: not a checkpoint directory") from None
    except OSError as error:
        raise DflashError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid json: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a json object")
    return value


class TensorReader:
    """Every tensor of the safetensors files of one directory, by name.

    A tensor is the mapped file itself: it costs no memory until touched, and the kernel may drop
    its pages again.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        for path in _shards(directory):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise DflashError(
                f"{path} is truncated or not a safetensors file ({error}): download it again"
            ) from error
        except OSError as error:
            raise DflashError(f"cannot read {path}: {error}") from error
        repeated = sorted(slices.keys() & self.shapes.keys())
        if repeated:
            raise CheckpointError(f"{path} repeats tensors of another file: {', '.join(repeated)}")
        for name, view in slices.items():
            self.shapes[name] = tuple(view.get_shape())
            self._dtypes[name] = view.get_dtype()
            self._handles[name] = handle

    def num_bytes(self, name: str) -> int:
        count = {**_FLOATS, **_INTEGERS}.get(self._dtypes[name], 1)
        for size in self.shapes[name]:
            count *= size
        return count

    def floating(self, name: str) -> torch.Tensor:
        """The mapped tensor; anything but plain floats (an fp8 or packed weight) is refused."""
        if self._dtypes[name] not in _FLOATS:
            raise CheckpointError(
                f"{self.directory}: {name} is {self._dtypes[name]}, expected one of "
                f"{', '.join(_FLOATS)}: quantized weights are not supported"
            )
        return self._handles[name].get_tensor(name)

    def integer(self, name: str) -> torch.Tensor:
        if self._dtypes[name] not in _INTEGERS:
            raise CheckpointError(f"{self.directory}: {name} is {self._dtypes[name]}, expected I64")
        return self._handles[name].get_tensor(name).to(torch.int64)


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        paths = [directory / name for name in sorted(set(weight_map.values()))]
        absent = [path.name for path in paths if not path.exists()]
        if absent:
            raise CheckpointError(f"{index} names files that are missing: {', '.join(absent)}")
        return paths
    single = directory / "model.safetensors"
    if single.exists():
        return [single]
    paths = sorted(directory.glob("*.safetensors"))
    if paths:
        return paths
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        raise CheckpointError(
            f"{directory} holds only pickled weights ({', '.join(pickled)}), which are never "
            "loaded: convert them to safetensors"
        )
    raise CheckpointError(f"{directory} holds no *.safetensors file")


def read_mask_embedding(
    directory: Path, mask_token_id: int, hidden_size: int
) -> torch.Tensor | None:
    """mask_embedding.pt by torch's tensors-only reader: [hidden_size]; None without the file.

    Raises:
        CheckpointError: it holds anything else, or is for another mask token.
        DflashError: it cannot be read.
    """
    path = directory / "mask_embedding.pt"
    if not path.exists():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DflashError(f"cannot read {path}: {error}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors, which is never loaded"
        ) from error
    if isinstance(state, dict):
        token = state.get("mask_token_id", mask_token_id)
        if int(token) != mask_token_id:
            raise CheckpointError(
                f"{path} is for mask token {int(token)}, the config's is {mask_token_id}"
            )
        state = state.get("embedding")
    if not isinstance(state, torch.Tensor) or state.numel() != hidden_size:
        raise CheckpointError(f"{path} must hold one embedding of {hidden_size} numbers")
    return state.reshape(hidden_size)


@contextmanager
def progress_bar(label: str, num_bytes: int) -> Iterator[Progress]:
    """A bar on stderr when that is a terminal; `advance(0, n)` after n bytes."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        progress.add_task(label, total=num_bytes)
        yield progress
