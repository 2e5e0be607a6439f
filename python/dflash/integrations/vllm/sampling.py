# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Draft tokens of vLLM's DFlash speculator: argmax of every mask row in one kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dflash.integrations.vllm.context_kv import is_capturing
from dflash.log import log_once
from dflash.ops.sample_draft import sample_draft


def install_0_26() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    if "_greedy_sample_draft" not in vars(DFlashSpeculator):  # else loaded twice
        original = DFlashSpeculator._greedy_sample_draft
        DFlashSpeculator._greedy_sample_draft = with_one_kernel(original)


def install_0_33() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    if "sample_draft" not in vars(DFlashSpeculator):
        DFlashSpeculator.sample_draft = without_logits_record(DFlashSpeculator.sample_draft)


def with_one_kernel(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """0.26's `_greedy_sample_draft`; the reduction across ranks stays vLLM's."""

    @functools.wraps(original)
    def _greedy_sample_draft(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.use_local_argmax_reduction:
            return original(self, hidden_states)
        return argmax(self, self.model.compute_logits(hidden_states))

    return _greedy_sample_draft


def without_logits_record(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """0.33's `sample_draft`, where it is greedy and nothing else reads the logits."""

    @functools.wraps(original)
    def sample(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recorded = kwargs.get("draft_logits", args[5] if len(args) > 5 else None)
        if (
            recorded is not None
            or self.use_local_argmax_reduction
            or self.acceptance_estimator is not None
        ):
            return original(self, hidden_states, *args, **kwargs)
        step = kwargs.get("spec_step_idx", args[6] if len(args) > 6 else 0)
        return argmax(self, self.compute_draft_logits(hidden_states, step))

    return sample


def argmax(speculator: Any, logits: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the first maximum of each row of logits [rows, V]; NaN is none."""
    rows = logits.shape[0]
    buffers = speculator.__dict__.get("_dflash_sampling")
    if buffers is None or buffers[0].shape[0] < rows:
        if is_capturing(logits):  # what graphs read must not be made inside one
            log_once("vLLM: draft sampling is left in a graph captured before its first eager step")
            return logits.argmax(dim=-1)
        count = max(rows, speculator.max_num_reqs * speculator.num_speculative_steps)
        positions = torch.zeros(count, dtype=torch.int64, device=logits.device)
        buffers = positions, torch.arange(count, dtype=torch.int32, device=logits.device)
        speculator.__dict__["_dflash_sampling"] = buffers
    positions, identity = buffers
    tokens = torch.empty(rows, 1, dtype=torch.int64, device=logits.device)
    sample_draft(logits, positions[:rows], identity[:rows], tokens)
    return tokens.view(rows)
