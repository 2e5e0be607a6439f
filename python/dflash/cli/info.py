# SPDX-License-Identifier: Apache-2.0
"""`dflash info`: what is here, what is not, and why."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import warnings
from importlib import metadata
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from dflash._conflict import PACKAGE_DIR, find_conflict
from dflash._library import LIBRARY_DIR, cuda_library_error

DISTRIBUTION = "dflash-cuda"
OPTIONAL_PACKAGES = ("flashinfer-python", "flash-attn", "flash-attn-3")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, devices, libraries, and what is unavailable and why."""
    facts = gather()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for section, lines in facts.items():
        for i, (name, value) in enumerate(lines.items()):
            console.print(Text(f"{section if i == 0 else '':13}", "bold") + f"{name}: {value}")


def gather() -> dict[str, dict[str, str]]:
    """Everything that `dflash info` says, as plain values."""
    unavailable: dict[str, str] = {}
    facts = {
        "versions": _versions(unavailable),
        "build": _build(unavailable),
        "devices": _devices(),
        "libraries": {"libdflash_ops": str(LIBRARY_DIR / "libdflash_ops.so")},
        "unavailable": unavailable,
        "conflict": {},
    }
    if cuda_library_error:
        unavailable["libdflash_cuda"] = cuda_library_error
    else:
        facts["libraries"]["libdflash_cuda"] = str(LIBRARY_DIR / "libdflash_cuda.so")
    reason = why_no_cuda()
    if reason:
        unavailable["GPU"] = reason
    conflict = find_conflict()
    if conflict:
        facts["conflict"]["dflash"] = conflict
    return facts


def why_no_cuda() -> str | None:
    """Why no GPU can serve here, or None when one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not cuda_is_available():
        return _driver_error()
    if cuda_library_error:
        return cuda_library_error
    if not any(_is_shipped(torch.cuda.get_device_capability(i)) for i in _device_indices()):
        names = ", ".join(torch.cuda.get_device_name(i) for i in _device_indices())
        return (
            f"no kernels for {names}: this build serves sm_90 (H100, H200) and sm_10x (B200, B300)"
        )
    return None


def cuda_is_available() -> bool:
    """torch's answer without its warning: what is wrong is said once, by us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def _driver_error() -> str:
    """torch's own words for a missing or an old driver, first sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except Exception as error:
        return str(error).strip().splitlines()[0].split(". ")[0]
    return "the driver shows no device (is CUDA_VISIBLE_DEVICES empty?)"


def _device_indices() -> range:
    return range(torch.cuda.device_count())


def _is_shipped(capability: tuple[int, int]) -> bool:
    """sm_90a runs on 9.0 alone, sm_100f on the whole 10.x family."""
    return capability == (9, 0) or capability[0] == 10


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _versions(unavailable: dict[str, str]) -> dict[str, str]:
    versions = {
        "dflash": f"{_version(DISTRIBUTION) or 'not installed as a distribution'} ({PACKAGE_DIR})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch CUDA": torch.version.cuda or "none",
        "transformers": _version("transformers") or "none",
    }
    for name in OPTIONAL_PACKAGES:
        version = _version(name)
        if version is None:
            unavailable[name] = "not installed (optional)"
        else:
            versions[name] = version
    return versions


def _build(unavailable: dict[str, str]) -> dict[str, str]:
    """What this build was made with, from dflash._C, which nothing else needs."""
    try:
        build_info = importlib.import_module("dflash._C").build_info()
    except ImportError as error:
        unavailable["dflash._C"] = str(error)
        return {}
    return {
        "compiler": build_info["compiler"],
        "CUDA": build_info["cuda_version"] or "none (built without nvcc)",
        "architectures shipped": ", ".join(build_info["cuda_architectures"]) or "none",
    }


def _devices() -> dict[str, str]:
    capability = torch.backends.cpu.get_cpu_capability()
    devices = {
        "cpu": f"{platform.machine()}, {capability}, {len(os.sched_getaffinity(0))} cores, "
        f"torch uses {torch.get_num_threads()} threads"
    }
    if not cuda_is_available():
        return devices
    for i in _device_indices():
        properties = torch.cuda.get_device_properties(i)
        served = "served" if _is_shipped((properties.major, properties.minor)) else "not served"
        devices[f"cuda:{i}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {served}"
        )
    return devices
