# SPDX-License-Identifier: Apache-2.0
"""`dflash info`: what is here, what is not, and why."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
from importlib import metadata
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from dflash._conflict import PACKAGE_DIR, find_conflict
from dflash._library import LIBRARY_DIR, cuda_library_error
from dflash.attention.select import all_answers
from dflash.attention.spec import AttentionSpec, Refusal
from dflash.cli import backends
from dflash.cli.generate import DFLASH
from dflash.devices import cuda_is_available, is_served, why_no_cuda

DISTRIBUTION = "dflash-cuda"
OPTIONAL_PACKAGES = ("flashinfer-python", "flash-attn", "flash-attn-3")


def info(
    model: Annotated[
        str | None, typer.Option(help="Say which attention backend each layer of this target gets.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The same for this drafter.")] = None,
    draft_method: Annotated[
        str, typer.Option(help="dflash, or autoregressive: --draft is a small model.")
    ] = DFLASH,
    device: Annotated[
        str,
        typer.Option(help="For --model and --draft: auto, cpu, cuda, cuda:N, or sm_90, sm_100."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show versions, devices, libraries, and what is unavailable and why; or the attention backends of a pair."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if model is not None or draft is not None:
        plans = backends.plan_backends(model, draft, device, draft_method)
        print(json.dumps(plans, indent=2)) if as_json else backends.print_plans(console, plans)
        return
    facts = gather()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
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
        "attention": _attention(unavailable),
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
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        served = "served" if is_served((properties.major, properties.minor)) else "not served"
        devices[f"cuda:{i}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {served}"
        )
    return devices


def _served_here() -> tuple[str, torch.dtype]:
    """The architecture and the dtype that a model would be served on here."""
    if not cuda_is_available():
        return "cpu", torch.float32
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}", torch.bfloat16


def _attention(unavailable: dict[str, str]) -> dict[str, str]:
    """What each backend answers for a plain Qwen3-8B layer, causal and not."""
    arch, dtype = _served_here()
    served = {}
    for causal in (True, False):
        spec = AttentionSpec(
            arch=arch, num_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype, kv_dtype=dtype,
            causal=causal, window=None, query_shape="ragged", kv_block_size=16,
        )  # fmt: skip
        for backend, answer in all_answers(spec).items():
            name = f"{backend} ({'causal' if causal else 'non-causal'})"
            if isinstance(answer, Refusal):
                unavailable[name] = answer.reason
            else:
                served[name] = "replayable" if answer.replayable else "eager"
                if answer.replayable and not answer.ragged:
                    served[name] += ", prompts eager"
    return served
