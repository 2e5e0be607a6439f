# SPDX-License-Identifier: Apache-2.0
"""What drafters share: uniform query rows at fixed addresses, and sampling from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buffers import Batch, RequestState
from dflash.engine.sampling import SamplingState
from dflash.models.drafter import Drafter
from dflash.models.target import Target
from dflash.ops.lm_head_sample import lm_head_sample, lm_head_sample_plan
from dflash.ops.sample_draft import sample_draft


@dataclass(frozen=True)
class DraftBuffers:
    """The query rows of a draft pass, as many for each request, and the positions they predict; at their largest size.

    A batch of R requests uses the leading R * num_query_per_req, R * num_samples_per_req and R entries.
    """

    num_query_per_req: int
    num_samples_per_req: int
    input_ids: torch.Tensor  # int64 [max_reqs * num_query_per_req]
    positions: torch.Tensor  # int64 [max_reqs * num_query_per_req]
    slot_mapping: torch.Tensor  # int64 [max_reqs * num_query_per_req]
    seq_lens: torch.Tensor  # int32 [max_reqs]
    query_start_loc: torch.Tensor  # int32 [max_reqs + 1]
    sample_positions: torch.Tensor  # int64 [max_reqs * num_samples_per_req]

    @classmethod
    def allocate(
        cls, max_reqs: int, num_query_per_req: int, num_samples_per_req: int, device: torch.device
    ) -> DraftBuffers:
        def zeros(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            num_query_per_req=num_query_per_req,
            num_samples_per_req=num_samples_per_req,
            input_ids=zeros(max_reqs * num_query_per_req),
            positions=zeros(max_reqs * num_query_per_req),
            slot_mapping=zeros(max_reqs * num_query_per_req),
            seq_lens=zeros(max_reqs, torch.int32),
            query_start_loc=zeros(max_reqs + 1, torch.int32),
            sample_positions=zeros(max_reqs * num_samples_per_req),
        )

    def of(self, num_reqs: int) -> DraftBuffers:
        """The leading part that so many requests use."""
        rows = num_reqs * self.num_query_per_req
        return DraftBuffers(
            num_query_per_req=self.num_query_per_req,
            num_samples_per_req=self.num_samples_per_req,
            input_ids=self.input_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            seq_lens=self.seq_lens[:num_reqs],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            sample_positions=self.sample_positions[: num_reqs * self.num_samples_per_req],
        )


def query_attention(rows: DraftBuffers, batch: Batch, max_model_len: int) -> AttentionBatch:
    """What attention reads of a pass over `rows`, the part that the requests of `batch` use."""
    return AttentionBatch(
        positions=rows.positions,
        slot_mapping=rows.slot_mapping,
        block_table=batch.block_table,
        seq_lens=rows.seq_lens,
        query_start_loc=rows.query_start_loc,
        max_query_len=rows.num_query_per_req,
        max_seq_len=max_model_len,
    )


def draft_tokens(
    model: Drafter | Target,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    idx_mapping: torch.Tensor,
    state: RequestState,
    sampling: SamplingState,
    *,
    sample_method: str,
    vocab_size: int,
    columns: slice = slice(None),
    logit_scale: float = 1.0,
    d2t: torch.Tensor | None = None,
) -> None:
    """Samples columns of every request's block into the state; see sample_draft.

    Drafts that need no record are sampled in the head's GEMM where lm_head_sample makes no logits.

    Args:
        model: whose head it is.
        hidden: [R * n, H] for n columns.
        positions: [R * n] int64, of the tokens predicted.
        idx_mapping: [R * n] int32, state rows.
        columns: of the block, the first given when it is not all of it.
    """
    gumbel = sample_method == "gumbel"
    first_column = columns.start or 0
    record = state.draft_logits if gumbel else None
    if not gumbel and lm_head_sample_plan(hidden, model.lm_head, vocab_size) is not None:
        lm_head_sample(
            hidden,
            model.lm_head,
            positions,
            idx_mapping,
            state.draft_tokens[:, columns],
            vocab_size=vocab_size,
            logit_scale=logit_scale,
            d2t=d2t,
            first_column=first_column,
        )
        return
    sample_draft(
        model.logits(hidden),
        positions,
        idx_mapping,
        temperatures=sampling.temperatures if gumbel else None,
        seeds=sampling.seeds if gumbel else None,
        vocab_size=vocab_size,
        logit_scale=logit_scale,
        d2t=d2t,
        first_column=first_column,
        draft_tokens=state.draft_tokens[:, columns],
        draft_logits=None if record is None else record[:, columns],
    )
