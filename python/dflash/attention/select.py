# SPDX-License-Identifier: Apache-2.0
"""The table of backends and the one place where one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.attention import flash_attn, flashinfer, native, sdpa
from dflash.attention.spec import (
    AttentionBackend,
    AttentionSpec,
    Backend,
    Refusal,
    Support,
    refusal,
)
from dflash.log import log_once

BACKENDS = (
    Backend("native", native.supports, native.NativeAttention),
    Backend("flash_attn", flash_attn.supports, flash_attn.FlashAttention, flash_attn.missing),
    Backend("flashinfer", flashinfer.supports, flashinfer.FlashInfer, flashinfer.missing),
    Backend("sdpa", sdpa.supports, sdpa.SdpaAttention),
    Backend(
        "flashinfer_split", flashinfer.supports_split, flashinfer.SplitFlashInfer,
        flashinfer.missing, is_automatic=False,
    ),
    Backend(
        "flashinfer_fa3", flashinfer.supports_fa3, flashinfer.Fa3FlashInfer,
        flashinfer.missing, is_automatic=False,
    ),
)  # fmt: skip
"""In order of preference: native serves every spec with nothing to plan; docs/performance.md has all their times."""


@dataclass(frozen=True)
class Choice:
    """The backend that serves a spec, and what every row of the table answered."""

    backend: Backend
    support: Support
    answers: dict[str, Support | Refusal]


def choose_backend(spec: AttentionSpec, requested: str = "auto") -> Choice:
    """The first backend that serves `spec`, or the one asked for by name. Makes nothing.

    Raises:
        ValueError: an unknown name, or nothing that serves the spec; the message has every reason.
    """
    if requested == "auto":
        candidates = [backend for backend in BACKENDS if backend.is_automatic]
    else:
        candidates = [backend for backend in BACKENDS if backend.name == requested]
    if not candidates:
        names = ", ".join(b.name for b in BACKENDS)
        raise ValueError(f"attention backend {requested!r} is unknown: expected auto, {names}")
    answers = all_answers(spec)
    for backend in candidates:
        answer = answers[backend.name]
        if isinstance(answer, Support):
            return Choice(backend, answer, answers)
    raise ValueError(f"no attention backend serves {spec}: {_reasons(candidates, answers)}")


def select_backend(
    spec: AttentionSpec, requested: str, device: torch.device
) -> tuple[Choice, AttentionBackend]:
    """The chosen backend, made. Says once what was passed over and why, and what will run eagerly.

    Raises:
        ValueError: as choose_backend.
    """
    choice = choose_backend(spec, requested)
    name = choice.backend.name
    if requested == "auto":
        before = BACKENDS[: BACKENDS.index(choice.backend)]
        if before:
            log_once(f"attention runs on {name}; passed over: {_reasons(before, choice.answers)}")
    if not choice.support.in_one_graph:
        log_once(f"attention backend {name} runs eagerly: {choice.support.reason}")
    return choice, choice.backend.make(spec, device)


def all_answers(spec: AttentionSpec) -> dict[str, Support | Refusal]:
    """What every row of the table says to `spec` on this machine."""
    return {backend.name: _answer(backend, spec) for backend in BACKENDS}


def _answer(backend: Backend, spec: AttentionSpec) -> Support | Refusal:
    answer = backend.supports(spec)
    reason = answer.reason if isinstance(answer, Refusal) else None
    return refusal(reason, backend.missing()) or answer


def _reasons(backends: Sequence[Backend], answers: dict[str, Support | Refusal]) -> str:
    return "; ".join(f"{b.name}: {answers[b.name].reason}" for b in backends)
