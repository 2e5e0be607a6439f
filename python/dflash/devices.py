# SPDX-License-Identifier: Apache-2.0
"""Which GPUs this build and this machine can use, and why not."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch

from dflash import _library

SERVED_DEVICES = "sm_90 (H100, H200) and sm_10x (B200, B300)"


def why_no_cuda() -> str | None:
    """Why no GPU can serve here, or None when one can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    if not cuda_is_available():
        return _driver_error()
    if _library.cuda_library_error:
        return _library.cuda_library_error
    devices = range(torch.cuda.device_count())
    if not any(is_served(torch.cuda.get_device_capability(i)) for i in devices):
        names = ", ".join(torch.cuda.get_device_name(i) for i in devices)
        return f"no kernels for {names}: this build serves {SERVED_DEVICES}"
    return None


def cuda_is_available() -> bool:
    """torch's answer without its warning: what is wrong is said once, by us."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_available()


def on_device(device: torch.device) -> AbstractContextManager:
    """Streams, events and graphs made inside belong to `device`, whichever is current outside."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_served(capability: tuple[int, int]) -> bool:
    """sm_90a runs on 9.0 alone, sm_100f on the whole 10.x family."""
    return capability == (9, 0) or capability[0] == 10


def _driver_error() -> str:
    """torch's own words for a missing or an old driver, first sentence."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
    except Exception as error:
        return (str(error).strip().splitlines() or ["unknown"])[0].split(". ")[0]
    return "the driver shows no device (is CUDA_VISIBLE_DEVICES empty?)"
