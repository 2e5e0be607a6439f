# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Draft tokens of vLLM's DFlash speculator: argmax of every mask row, in the head's GEMM where a kernel serves it.

Gumbel sampling stays vLLM's: its acceptance needs the logits and vLLM's own noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dflash.integrations.vllm.context_kv import is_capturing
from dflash.log import log_once
from dflash.ops.lm_head_sample import lm_head_sample, lm_head_sample_plan
from dflash.ops.sample_draft import sample_draft


class Known(NamedTuple):
    """Classes of vLLM whose logits are hidden_states @ weight.T, scaled."""

    model: type
    processor: type
    head_method: type  # of an unquantised head


def install_0_26() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    if "_greedy_sample_draft" not in vars(DFlashSpeculator):  # else loaded twice
        original = DFlashSpeculator._greedy_sample_draft
        DFlashSpeculator._greedy_sample_draft = with_one_kernel(original, _known())


def install_0_33() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    if "sample_draft" not in vars(DFlashSpeculator):
        original, base = DFlashSpeculator.sample_draft, DFlashSpeculator.compute_draft_logits
        DFlashSpeculator.sample_draft = without_logits_record(original, _known(), base)


def _known() -> Known:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    return Known(DFlashQwen3ForCausalLM, LogitsProcessor, UnquantizedEmbeddingMethod)


def with_one_kernel(
    original: Callable[..., torch.Tensor], known: Known
) -> Callable[..., torch.Tensor]:
    """0.26's `_greedy_sample_draft`; the reduction across ranks stays vLLM's."""

    @functools.wraps(original)
    def _greedy_sample_draft(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.use_local_argmax_reduction:
            log_once("vLLM: draft sampling is left: ranks reduce their own maxima")
            return original(self, hidden_states)
        head = plain_head(self.model, known)
        return greedy(self, hidden_states, head, self.model.compute_logits)

    return _greedy_sample_draft


def without_logits_record(
    original: Callable[..., torch.Tensor], known: Known, compute_draft_logits: Callable
) -> Callable[..., torch.Tensor]:
    """0.33's `sample_draft`, where it is greedy and nothing else reads the logits.

    Args:
        compute_draft_logits: the method that only asks the model for them.
    """

    @functools.wraps(original)
    def sample(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        recorded = kwargs.get("draft_logits", args[5] if len(args) > 5 else None)
        if (
            recorded is not None
            or self.use_local_argmax_reduction
            or self.acceptance_estimator is not None
        ):
            log_once("vLLM: draft sampling is left: more than the tokens is asked for")
            return original(self, hidden_states, *args, **kwargs)
        step = kwargs.get("spec_step_idx", args[6] if len(args) > 6 else 0)
        plain = type(self).compute_draft_logits is compute_draft_logits
        head = plain_head(self.model, known) if plain else None
        return greedy(
            self, hidden_states, head, lambda hidden: self.compute_draft_logits(hidden, step)
        )

    return sample


class Head(NamedTuple):
    weight: torch.Tensor  # [>= vocab_size, H]
    vocab_size: int
    scale: float
    d2t: torch.Tensor | None


def plain_head(model: Any, known: Known) -> Head | None:
    """What lm_head_sample needs of a model; None where its logits are more than a scaled product."""
    if getattr(type(model), "compute_logits", None) is not known.model.compute_logits:
        return None
    head, processor = model.lm_head, model.logits_processor
    if type(processor) is not known.processor or processor.soft_cap is not None:
        return None
    if processor.logits_as_input or getattr(head, "tp_size", 2) > 1:
        return None
    if type(getattr(head, "quant_method", None)) is not known.head_method:
        return None
    if processor.head_dtype not in (None, head.weight.dtype):
        return None
    d2t = model.draft_id_to_target_id
    return Head(head.weight, processor.org_vocab_size, processor.scale, d2t)


def greedy(
    speculator: Any,
    hidden_states: torch.Tensor,
    head: Head | None,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """int64 [rows]: the first maximum of each row's logits; NaN is none."""
    rows, device = hidden_states.shape[0], hidden_states.device
    buffers = speculator.__dict__.get("_dflash_sampling")
    if buffers is None or buffers[0].shape[0] < rows:
        if is_capturing(hidden_states):  # what graphs read must not be made inside one
            log_once("vLLM: draft sampling is left in a graph captured before its first eager step")
            return compute_logits(hidden_states).argmax(dim=-1)
        count = max(rows, speculator.max_num_reqs * speculator.num_speculative_steps)
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        buffers = zeros, torch.arange(count, dtype=torch.int32, device=device)
        speculator.__dict__["_dflash_sampling"] = buffers
    positions, identity = buffers[0][:rows], buffers[1][:rows]
    tokens = torch.empty(rows, 1, dtype=torch.int64, device=device)
    if head is not None and lm_head_sample_plan(hidden_states, head.weight, head.vocab_size):
        lm_head_sample(
            hidden_states,
            head.weight,
            positions,
            identity,
            tokens,
            vocab_size=head.vocab_size,
            logit_scale=head.scale,
            d2t=head.d2t,
        )
    else:
        log_once(
            "vLLM: drafts are sampled from logits: the head's GEMM samples up to 128 rows, 225 to 256 or 449 to "
            "512 where its tiles fill the SMs, of a plain, unquantised head of more than 8448 tokens on sm_90"
        )
        sample_draft(compute_logits(hidden_states), positions, identity, tokens)
    return tokens.view(rows)
