# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Context rows and query block of vLLM 0.26's DFlash speculator: build_query in the place of its kernel.

One launch a K/V group, as vLLM's, into vLLM's own buffers: no copy. Rejected rows get slot -1, lengths end at
max_model_len, and requests up to the largest batch are padded for the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dflash.log import log_once
from dflash.ops.build_query import build_query


def install() -> None:
    from vllm.v1.worker.gpu.spec_decode.dflash import speculator

    original = speculator.prepare_dflash_inputs
    if not hasattr(original, "__wrapped__"):  # else loaded twice in one process
        speculator.prepare_dflash_inputs = with_build_query(original)


class Arguments(NamedTuple):
    """Of vLLM's `prepare_dflash_inputs`, in its order and by its names. Buffers are those of the largest batch."""

    input_buffers: Any  # input_ids int32, positions int64, query_start_loc int32, seq_lens int32
    query_slot_mapping: torch.Tensor  # int64, as the next four
    context_positions: torch.Tensor
    context_slot_mapping: torch.Tensor
    sample_indices: torch.Tensor
    sample_pos: torch.Tensor
    sample_idx_mapping: torch.Tensor  # int32
    input_batch: Any  # of the target: its views may be longer than the batch
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    last_sampled: torch.Tensor  # [max_num_reqs, 1] int64
    next_prefill_tokens: torch.Tensor  # [max_num_reqs] int32
    block_table: torch.Tensor  # [max_num_reqs, columns]
    block_size: int
    parallel_drafting_token_id: int
    num_query_per_req: int
    num_speculative_steps: int
    max_num_reqs: int
    max_num_tokens: int
    max_model_len: int
    sample_from_anchor: bool = False


def with_build_query(original: Callable[..., None]) -> Callable[..., None]:
    """vLLM's function; a batch with more query rows than its buffers hold stays with the original."""

    @functools.wraps(original)
    def prepare_dflash_inputs(*args: Any, **kwargs: Any) -> None:
        a = Arguments(*args, **kwargs)
        room = min(a.max_num_reqs, a.max_num_tokens // a.num_query_per_req)
        if a.input_batch.num_reqs > room:
            log_once(
                f"vLLM: input preparation of {a.input_batch.num_reqs} requests is left: its buffers hold {room} of "
                f"{a.num_query_per_req} rows; raise max_num_batched_tokens"
            )
            return original(*args, **kwargs)
        _build(a, room)

    return prepare_dflash_inputs


def _build(a: Arguments, room: int) -> None:
    """The batch's rows, and padding up to `room` requests."""
    reqs, rows = a.input_batch.num_reqs, a.input_batch.num_tokens
    queries, samples = room * a.num_query_per_req, room * a.num_speculative_steps
    build_query(
        a.input_batch.positions[:rows],
        a.input_batch.query_start_loc[: reqs + 1],
        a.num_sampled[:reqs],
        a.num_rejected[:reqs],
        a.last_sampled.view(-1),
        a.next_prefill_tokens,
        a.input_batch.idx_mapping[:reqs],
        [a.block_table[:reqs]],
        [a.block_size],
        a.num_speculative_steps,
        a.parallel_drafting_token_id,
        a.max_model_len,
        a.sample_from_anchor,
        a.context_positions[:rows],
        [a.context_slot_mapping[:rows]],
        a.input_buffers.input_ids[:queries],
        a.input_buffers.positions[:queries],
        [a.query_slot_mapping[:queries]],
        a.input_buffers.seq_lens[:room],
        a.input_buffers.query_start_loc[: room + 1],
        a.sample_indices[:samples],
        a.sample_pos[:samples],
        a.sample_idx_mapping[:samples],
    )
