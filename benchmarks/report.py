# SPDX-License-Identifier: Apache-2.0
"""How a benchmark writes its results: figures, hardware, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def facts() -> dict:
    """The machine and the code that figures belong to."""
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": _hardware(),
    }


def _commit() -> str:
    """DFLASH_COMMIT where the code was copied without its history."""
    if "DFLASH_COMMIT" in os.environ:
        return os.environ["DFLASH_COMMIT"]
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.stdout.strip() or "unknown"


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{models[0] if models else platform.machine()}, {len(models)} cores"


def write(name: str, figures: object, folder: str | None = None) -> Path:
    """Writes <folder>/<name>.json and returns its path."""
    path = Path(folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts() | {"figures": figures}, indent=2) + "\n")
    return path
