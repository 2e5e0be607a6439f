# SPDX-License-Identifier: Apache-2.0
"""Loads the op libraries, once, at import."""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY_DIR = Path(__file__).parent / "lib"

cuda_library_error: str | None = None
"""Why libdflash_cuda is not loaded, or None when it is."""


def _load() -> str | None:
    ops = LIBRARY_DIR / "libdflash_ops.so"
    if not ops.is_file():
        raise ImportError(
            f"dflash: {ops} is missing: the package was not built. Run `pip install .` in a checkout."
        )
    torch.ops.load_library(ops)
    cuda = LIBRARY_DIR / "libdflash_cuda.so"
    if not cuda.is_file():
        return "this build has no libdflash_cuda (built without nvcc)"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    try:
        torch.ops.load_library(cuda)
    except OSError as error:
        return f"libdflash_cuda does not load: {error}"
    return None


cuda_library_error = _load()
