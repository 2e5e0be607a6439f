# SPDX-License-Identifier: Apache-2.0
"""Fixed-address buffers of a draft pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftBuffers:
    """Everything build_query writes and the draft pass reads, at its largest size.

    A batch of R requests and T target rows uses the leading R * Q, R * N, R and T entries.
    """

    context_positions: torch.Tensor  # int64 [max_rows]
    context_slot_mapping: torch.Tensor  # int64 [max_rows]
    query_input_ids: torch.Tensor  # int64 [max_reqs * Q]
    query_positions: torch.Tensor  # int64 [max_reqs * Q]
    query_slot_mapping: torch.Tensor  # int64 [max_reqs * Q]
    query_seq_lens: torch.Tensor  # int32 [max_reqs]
    query_start_loc: torch.Tensor  # int32 [max_reqs + 1]
    sample_rows: torch.Tensor  # int64 [max_reqs * N]
    sample_positions: torch.Tensor  # int64 [max_reqs * N]
    sample_idx_mapping: torch.Tensor  # int32 [max_reqs * N]

    @classmethod
    def allocate(
        cls, max_rows: int, max_reqs: int, num_speculative_tokens: int, device: torch.device
    ) -> DraftBuffers:
        num_queries = max_reqs * (num_speculative_tokens + 1)
        num_samples = max_reqs * num_speculative_tokens

        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            context_positions=zeros(max_rows),
            context_slot_mapping=zeros(max_rows),
            query_input_ids=zeros(num_queries),
            query_positions=zeros(num_queries),
            query_slot_mapping=zeros(num_queries),
            query_seq_lens=zeros(max_reqs, torch.int32),
            query_start_loc=zeros(max_reqs + 1, torch.int32),
            sample_rows=zeros(num_samples),
            sample_positions=zeros(num_samples),
            sample_idx_mapping=zeros(num_samples, torch.int32),
        )
