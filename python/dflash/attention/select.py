# SPDX-License-Identifier: Apache-2.0
"""The table of backends and the one place where one is chosen."""

from __future__ import annotations

import logging

from dflash.attention import native, sdpa
from dflash.attention.spec import AttentionBackend, AttentionSpec, Backend, Refusal

logger = logging.getLogger("dflash")

BACKENDS = (
    Backend("native", native.supports, native.NativeAttention),
    Backend("sdpa", sdpa.supports, sdpa.SdpaAttention),
)
"""In order of preference."""


def select_backend(spec: AttentionSpec, requested: str = "auto") -> tuple[str, AttentionBackend]:
    """The first backend that serves `spec`, or the one asked for by name.

    Raises:
        ValueError: an unknown name, or a backend that refuses the spec.
    """
    candidates = [b for b in BACKENDS if requested in ("auto", b.name)]
    if not candidates:
        names = ", ".join(b.name for b in BACKENDS)
        raise ValueError(f"attention backend {requested!r} is unknown: expected auto, {names}")
    refusals = []
    for backend in candidates:
        answer = backend.supports(spec)
        if not isinstance(answer, Refusal):
            return backend.name, backend.make(spec)
        refusals.append(f"{backend.name}: {answer.reason}")
    raise ValueError(f"no attention backend serves {spec}: {'; '.join(refusals)}")
