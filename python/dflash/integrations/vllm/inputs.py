# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Context rows and query block of vLLM 0.26's DFlash speculator: build_query in the place of its kernel.

One launch a K/V group, as vLLM's, into vLLM's own buffers: no copy. Rejected rows get slot -1, lengths end at
max_model_len, and requests up to the largest batch are padded for the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dflash.ops.build_query import build_query


def install() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    original = speculator.prepare_dflash_inputs
    if not hasattr(original, "__wrapped__"):  # else loaded twice in one process
        speculator.prepare_dflash_inputs = with_build_query(original)


def with_build_query(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's `prepare_dflash_inputs`."""

    @functools.wraps(original)
    def prepare_dflash_inputs(
        input_buffers: Any,
        query_slot_mapping: torch.Tensor,
        context_positions: torch.Tensor,
        context_slot_mapping: torch.Tensor,
        sample_indices: torch.Tensor,
        sample_pos: torch.Tensor,
        sample_idx_mapping: torch.Tensor,
        input_batch: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        parallel_drafting_token_id: int,
        num_query_per_req: int,
        num_speculative_steps: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        sample_from_anchor: bool = False,
    ) -> None:
        reqs, rows = input_batch.num_reqs, input_batch.num_tokens
        room = min(max_num_reqs, max_num_tokens // num_query_per_req)
        queries, samples = room * num_query_per_req, room * num_speculative_steps
        build_query(
            input_batch.positions[:rows],
            input_batch.query_start_loc[: reqs + 1],
            num_sampled[:reqs],
            num_rejected[:reqs],
            last_sampled.view(-1),
            next_prefill_tokens,
            input_batch.idx_mapping[:reqs],
            [block_table[:reqs]],
            [block_size],
            num_speculative_steps,
            parallel_drafting_token_id,
            max_model_len,
            sample_from_anchor,
            context_positions[:rows],
            [context_slot_mapping[:rows]],
            input_buffers.input_ids[:queries],
            input_buffers.positions[:queries],
            [query_slot_mapping[:queries]],
            input_buffers.seq_lens[:room],
            input_buffers.query_start_loc[: room + 1],
            sample_indices[:samples],
            sample_pos[:samples],
            sample_idx_mapping[:samples],
        )

    return prepare_dflash_inputs
