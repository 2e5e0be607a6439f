# SPDX-License-Identifier: Apache-2.0
"""The machine and the code that figures belong to: hardware, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import dflash


def facts(device: str | None = None) -> dict:
    """`device` is what figures were taken on; None: the GPU, where there is one."""
    on_gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    return {
        "command": _command(),
        "commit": _commit(),
        "dflash": dflash.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": _gpu(device) if on_gpu else _cpu(),
    }


def write_results(path: Path, figures: object, device: str | None = None) -> None:
    """Figures and what they belong to, as json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = facts(device) | {"figures": figures}
    path.write_text(json.dumps(results, indent=2, allow_nan=False) + "\n")


def _command() -> str:
    """As it was typed."""
    if Path(sys.argv[0]).name == "dflash":
        return shlex.join(["dflash", *sys.argv[1:]])
    return shlex.join(["python", *sys.orig_argv[1:]])


def _commit() -> str:
    """DFLASH_COMMIT where the code was copied without its history."""
    if "DFLASH_COMMIT" in os.environ:
        return os.environ["DFLASH_COMMIT"]
    # NOTE: an installed package may lie in a folder of somebody else's repository.
    if not _git("ls-files", Path(__file__).name):
        return "unknown"
    return _git("describe", "--always", "--dirty") or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    folder = Path(__file__).parent
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return run.stdout.strip()


def _gpu(device: str | None) -> str:
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name, count = models[0] if models else platform.machine(), len(models) or os.cpu_count()
    return f"{name}, {count} cores"
