# SPDX-License-Identifier: Apache-2.0
"""Engine arguments, checked, and the device they mean."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from numbers import Integral

import torch

from dflash.attention.select import BACKENDS
from dflash.devices import SERVED_DEVICES, cuda_is_available, is_served, why_no_cuda
from dflash.errors import DflashError
from dflash.log import log_once

DFLASH, AUTOREGRESSIVE = "dflash", "autoregressive"
DRAFT_METHODS = (DFLASH, AUTOREGRESSIVE)

DRAFT_QUANTIZATIONS = ("fp8",)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SMALLEST = {
    "num_speculative_tokens": 1,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "kv_block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_gpu_blocks_override": 2,
}
"""Integers, and what they may be at least."""


@dataclass(frozen=True)
class EngineArgs:
    """Engine arguments, under vLLM's names where vLLM has them.

    Args:
        model, draft: checkpoints; see LLM.
        draft_method: what `draft` is: "dflash", a drafter of that kind, or "autoregressive" (vLLM's "draft_model"), an
            ordinary small model of the target's vocabulary that drafts token by token.
        draft_quantization: None, or "fp8": the drafter's matrices but its embedding, its head and what makes context
            K/V become float8_e4m3fn, a scale an output, at load. Half their bytes; drafts change a little, the
            output does not. For draft_method "dflash".
        dtype: "auto" (the checkpoint's on a GPU, float32 on a CPU), float32, float16 or bfloat16.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        num_speculative_tokens: N; None takes draft_block_size - 1, on a CPU what a short measurement finds best; 4 of
            an autoregressive drafter.
        allow_long_drafts: permit N past draft_block_size - 1, where drafters propose poorly.
        max_model_len: prompt and output tokens of a request; None takes the target's.
        max_num_seqs: requests that run at once; others wait.
        max_num_batched_tokens: prompt rows of one prefill pass.
        inter_token_latency_target_ms: what running requests may wait for a token while prompts are prefilled: chunks
            become shorter; None = no bound.
        kv_block_size: slots of a cache block.
        kv_cache_dtype, draft_kv_cache_dtype: "auto" (the model's), or "fp8" (e4m3, scale 1).
        enable_prefix_caching: keep the K/V of finished requests and reuse those of a common beginning.
        gpu_memory_utilization: share of the GPU's memory that everything together may take.
        kv_cache_memory_bytes: of both caches; None takes what is left (on a CPU at most 4 GiB).
        num_gpu_blocks_override: cache blocks, whatever memory says; on a CPU too.
        enforce_eager: do not capture CUDA graphs.
        strict: every target row goes through the same arithmetic, whatever is computed beside it: its logits' bits do
            not depend on the batch, on chunks, on N, on the drafter or on preemption. Costs padding: GEMMs of 128 rows.
        attention_backend, draft_attention_backend: "auto" or a backend's name.
        draft_sample_method: "greedy" or "gumbel".
        rejection_sample_method: "match", "standard", "block" or "synthetic", for temperature > 0.
        synthetic_acceptance_rates: N conditional rates, for "synthetic" (benchmarks only: it changes the output).
        seed: of requests that bring none.
    """

    model: str
    draft: str | None = None
    draft_method: str = DFLASH
    draft_quantization: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    num_speculative_tokens: int | None = None
    allow_long_drafts: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    inter_token_latency_target_ms: float | None = None
    kv_block_size: int = 16
    kv_cache_dtype: str = "auto"
    draft_kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enforce_eager: bool = False
    strict: bool = False
    attention_backend: str = "auto"
    draft_attention_backend: str = "auto"
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "match"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("model", "draft"):
            if getattr(self, name) == "":
                raise ValueError(
                    f"{name}: expected a folder, a GGUF file or a hub id, got an empty name"
                )
        self._check_choice("dtype", ("auto", *DTYPES))
        self._check_choice("draft_method", DRAFT_METHODS)
        self._check_choice("draft_sample_method", ("greedy", "gumbel"))
        self._check_choice("rejection_sample_method", ("match", "standard", "block", "synthetic"))
        for name in ("kv_cache_dtype", "draft_kv_cache_dtype"):
            self._check_choice(name, ("auto", "fp8"))
        for name, smallest in SMALLEST.items():
            self._check_at_least(name, smallest)
        if not isinstance(self.seed, Integral):
            raise ValueError(f"seed: expected an integer, got {self.seed!r}")
        target = self.inter_token_latency_target_ms
        if target is not None and not 0 < target < float("inf"):
            raise ValueError(
                f"inter_token_latency_target_ms must be > 0 and finite, got {target}; None = no bound"
            )
        if self.num_speculative_tokens is not None and self.draft is None:
            raise ValueError("num_speculative_tokens needs a drafter: pass draft=")
        if self.draft_method != DFLASH and self.draft is None:
            raise ValueError(f"draft_method {self.draft_method!r} needs a drafter: pass draft=")
        self._check_draft_quantization()
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if any(not 0.0 <= rate <= 1.0 for rate in self.synthetic_acceptance_rates or ()):
            raise ValueError(
                f"synthetic_acceptance_rates must be in [0, 1], got {self.synthetic_acceptance_rates}"
            )
        for name in ("attention_backend", "draft_attention_backend"):
            self._check_choice(name, ("auto", *(backend.name for backend in BACKENDS)))
        if self.strict and self.attention_backend not in ("auto", "native"):
            raise ValueError(
                f"strict needs the native attention backend, not {self.attention_backend!r}"
            )
        if (self.rejection_sample_method == "synthetic") != bool(self.synthetic_acceptance_rates):
            raise ValueError(
                'rejection_sample_method "synthetic" and synthetic_acceptance_rates go together'
            )

    def _check_draft_quantization(self) -> None:
        if self.draft_quantization is None:
            return
        if self.draft_quantization not in DRAFT_QUANTIZATIONS:
            raise ValueError(
                f"draft_quantization {self.draft_quantization!r}: expected None or one of "
                f"{', '.join(DRAFT_QUANTIZATIONS)}"
            )
        if self.draft is None:
            raise ValueError("draft_quantization needs a drafter: pass draft=")
        if self.draft_method != DFLASH:
            raise ValueError(
                f"draft_quantization is for DFlash drafters, not draft_method {self.draft_method!r}"
            )

    def _check_at_least(self, name: str, smallest: int) -> None:
        value, optional = getattr(self, name), type(self).__dataclass_fields__[name].default is None
        if value is None and optional:
            return
        if not isinstance(value, Integral):
            raise ValueError(f"{name}: expected an integer, got {value!r}")
        if value < smallest:
            raise ValueError(f"{name} must be >= {smallest}, got {value}")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(
                f"{name} {getattr(self, name)!r}: expected one of {', '.join(choices)}"
            )


def cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a K/V cache."""
    return torch.float8_e4m3fn if name == "fp8" else model_dtype


def resolve_device(device: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda[:N]".

    Raises:
        ValueError: the name is not a device.
        DflashError: CUDA was asked for and cannot be used; says why.
    """
    if device == "auto":
        device = _best_device()
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r}: expected auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda":
        reason = why_no_cuda()
        if reason is not None:
            raise DflashError(f"device {device}: {reason}; the device cpu works everywhere")
        count = torch.cuda.device_count()
        if (resolved.index or 0) >= count:
            raise ValueError(f"device {device}: this machine has {count} GPU(s)")
        resolved = torch.device("cuda", resolved.index or 0)
        if not is_served(torch.cuda.get_device_capability(resolved)):
            raise DflashError(
                f"device {device} is a {torch.cuda.get_device_name(resolved)}; this build serves {SERVED_DEVICES}"
            )
    return resolved


def _best_device() -> str:
    """The first GPU this build serves, else the CPU; a GPU passed over is said."""
    reason = why_no_cuda()
    if reason is None:
        served = (
            is_served(torch.cuda.get_device_capability(i)) for i in range(torch.cuda.device_count())
        )
        return f"cuda:{list(served).index(True)}"
    if cuda_is_available():
        log_once(f"running on the CPU, although there is a GPU: {reason}", logging.WARNING)
    return "cpu"
