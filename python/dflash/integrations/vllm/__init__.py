# SPDX-License-Identifier: Apache-2.0
"""dflash's ops under vLLM's own DFlash speculator: a general plugin of vLLM, off unless DFLASH_VLLM=1.

vLLM calls `register` in every process. A part is taken over only where each function it replaces or relies on has the
source that we know (known.py); what was taken over and what was left is said once. Draft attention is an attention
backend: it serves where speculative_config names it, {"attention_backend": "CUSTOM"}. Input preparation and sampling
are those of the second model runner (VLLM_USE_V2_MODEL_RUNNER), context K/V and attention serve both.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from dflash import _library
from dflash.integrations.vllm.known import PARTS, Part
from dflash.integrations.vllm.sources import find_vllm, reason_to_leave
from dflash.log import log_once

SWITCH = "DFLASH_VLLM"
INVARIANT = "VLLM_BATCH_INVARIANT"  # of vLLM: a row's bits do not depend on its batch
LEFT = ("Gumbel sampling of drafts: vLLM accepts them by its own noise and record",)


def register() -> None:
    """The entry point: installs what fits the vLLM that is here."""
    if os.environ.get(SWITCH) != "1":
        return
    try:
        _take_over()
    except Exception as error:  # vLLM must start without us
        log_once(f"vLLM: nothing taken over: {error!r}", logging.ERROR)


def _take_over() -> None:
    root, version = find_vllm()
    if _library.cuda_library_error is not None:
        log_once(f"vLLM {version}: nothing taken over: {_library.cuda_library_error}")
        return
    if os.environ.get(INVARIANT, "0") not in ("", "0"):
        log_once(
            f"vLLM {version}: nothing taken over: {INVARIANT}, and our kernels follow the rows"
        )
        return
    taken, left = install(root, version)
    log_once(f"vLLM {version}: taken over: {_listed(taken)}; left: {_listed([*left, *LEFT])}")


def install(root: Path, version: str, parts: Iterable[Part] = PARTS) -> tuple[list[str], list[str]]:
    """Takes over the parts whose functions are known; names of those, and of the others with the reason."""
    taken, left = [], []
    for part in parts:
        reason = reason_to_leave(root, version, part)
        if reason is not None:
            left.append(f"{part.name}: {reason}")
            continue
        module, _, function = part.versions[version].install.partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        except Exception as error:  # vLLM must start without us
            log_once(f"vLLM {version}: {part.name}: {error!r}", logging.ERROR)
            left.append(f"{part.name}: {error!r}")
            continue
        taken.append(part.name)
    return taken, left


def _listed(names: list[str]) -> str:
    return "; ".join(names) or "nothing"
