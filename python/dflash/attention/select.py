# SPDX-License-Identifier: Apache-2.0
"""The table of backends and the one place where one is chosen."""

from __future__ import annotations

from dflash.attention import native, sdpa
from dflash.attention.spec import AttentionBackend, AttentionSpec, Backend, Refusal
from dflash.log import log_once

BACKENDS = (
    Backend("native", native.supports, native.NativeAttention),
    Backend("sdpa", sdpa.supports, sdpa.SdpaAttention),
)
"""In order of preference."""


def select_backend(spec: AttentionSpec, requested: str = "auto") -> tuple[str, AttentionBackend]:
    """The first backend that serves `spec`, or the one asked for by name.

    Says once what was passed over and why, and that the chosen one runs eagerly.

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
            if refusals:
                log_once(f"attention runs on {backend.name}; passed over: {'; '.join(refusals)}")
            if not answer.replayable:
                log_once(f"attention backend {backend.name} is not replayable: it runs eagerly")
            return backend.name, backend.make(spec)
        refusals.append(f"{backend.name}: {answer.reason}")
    raise ValueError(f"no attention backend serves {spec}: {'; '.join(refusals)}")


def why_eager(name: str, spec: AttentionSpec) -> str | None:
    """Why a chosen backend cannot stand in the iteration's graph; None when it can."""
    (answer,) = (backend.supports(spec) for backend in BACKENDS if backend.name == name)
    assert not isinstance(answer, Refusal)
    if answer.replayable and answer.in_one_graph:
        return None
    return f"attention backend {name} is not replayable"
