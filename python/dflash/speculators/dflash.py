# SPDX-License-Identifier: Apache-2.0
"""DFlash: observe every scheduled row, propose a block in one pass."""

from __future__ import annotations

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buffers import Batch, RequestState
from dflash.engine.sampling import SamplingState
from dflash.models.drafter import Drafter
from dflash.ops.build_query import build_query
from dflash.ops.sample_draft import sample_draft
from dflash.speculators.buffers import DraftBuffers


class DFlashSpeculator:
    """The drafter's half of a step. Its K/V live in the slots of the target's block table.

    Args:
        drafter: the draft model, caches attached.
        num_speculative_tokens: N; a query block has N + 1 rows.
        max_rows, max_reqs: largest batch.
        max_model_len: positions are clamped to it.
        target_vocab_size: ids the target knows; a drafter padded further never proposes past them.
        sample_method: "greedy" (argmax) or "gumbel" (a sample of q, recorded for the acceptance).
    """

    def __init__(
        self,
        drafter: Drafter,
        num_speculative_tokens: int,
        max_rows: int,
        max_reqs: int,
        max_model_len: int,
        target_vocab_size: int,
        sample_method: str = "greedy",
    ) -> None:
        self.drafter = drafter
        self.num_speculative_tokens = num_speculative_tokens
        self.num_query_per_req = num_speculative_tokens + 1
        self.max_model_len = max_model_len
        self.vocab_size = drafter.config.draft_vocab_size or min(
            drafter.config.decoder.vocab_size, drafter.lm_head.shape[0], target_vocab_size
        )
        self.sample_method = sample_method
        device = drafter.fc.device
        self.buffers = DraftBuffers.allocate(max_rows, max_reqs, num_speculative_tokens, device)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids

    def prepare(self, batch: Batch, state: RequestState) -> None:
        """Context rows and the query block of the batch the target has just verified."""
        b, reqs, rows = self.buffers, batch.num_reqs, batch.num_rows
        samples = reqs * self.num_speculative_tokens
        queries = reqs * self.num_query_per_req
        build_query(
            batch.positions,
            batch.query_start_loc,
            batch.num_sampled,
            batch.num_rejected,
            state.last_sampled,
            state.next_prefill_tokens,
            batch.idx_mapping,
            [batch.block_table],
            [batch.kv_block_size],
            num_speculative_tokens=self.num_speculative_tokens,
            mask_token_id=self.drafter.config.mask_token_id,
            max_model_len=self.max_model_len,
            sample_from_anchor=False,
            context_positions=b.context_positions[:rows],
            context_slot_mappings=[b.context_slot_mapping[:rows]],
            query_input_ids=b.query_input_ids[:queries],
            query_positions=b.query_positions[:queries],
            query_slot_mappings=[b.query_slot_mapping[:queries]],
            query_seq_lens=b.query_seq_lens[:reqs],
            draft_query_start_loc=b.query_start_loc[: reqs + 1],
            sample_rows=b.sample_rows[:samples],
            sample_positions=b.sample_positions[:samples],
            sample_idx_mapping=b.sample_idx_mapping[:samples],
        )

    def observe(self, batch: Batch, taps: torch.Tensor) -> None:
        """Stores every draft layer's K/V of the batch's rows, from the target's taps [T, n * H]."""
        rows = batch.num_rows
        self.drafter.store_context(
            self.drafter.combine(taps[:rows]),
            self.buffers.context_positions[:rows],
            self.buffers.context_slot_mapping[:rows],
        )

    def attention(self, batch: Batch) -> AttentionBatch:
        """The query blocks over the drafter's caches."""
        b, reqs = self.buffers, batch.num_reqs
        queries = reqs * self.num_query_per_req
        return AttentionBatch(
            positions=b.query_positions[:queries],
            slot_mapping=b.query_slot_mapping[:queries],
            block_table=batch.block_table,
            seq_lens=b.query_seq_lens[:reqs],
            query_start_loc=b.query_start_loc[: reqs + 1],
            max_query_len=self.num_query_per_req,
            max_seq_len=self.max_model_len,
        )

    def draft(self, batch: Batch, prepare: bool = True) -> torch.Tensor:
        """Logits [R * N, V_draft] of the mask rows. prepare: host work of an eager forward."""
        attention = self.attention(batch)
        if prepare:
            self.drafter.decoder.prepare(attention)
        b, num_queries = self.buffers, attention.positions.shape[0]
        hidden = self.drafter.forward(b.query_input_ids[:num_queries], attention)
        rows = b.sample_rows[: batch.num_reqs * self.num_speculative_tokens]
        return self.drafter.logits(hidden.index_select(0, rows))

    def sample(
        self, batch: Batch, logits: torch.Tensor, state: RequestState, sampling: SamplingState
    ) -> None:
        """Writes draft tokens (and, when sampled, the logits they were drawn from) to the state."""
        b, config = self.buffers, self.drafter.config
        samples = batch.num_reqs * self.num_speculative_tokens
        gumbel = self.sample_method == "gumbel"
        sample_draft(
            logits,
            b.sample_positions[:samples],
            b.sample_idx_mapping[:samples],
            temperatures=sampling.temperatures if gumbel else None,
            seeds=sampling.seeds if gumbel else None,
            vocab_size=self.vocab_size,
            logit_scale=config.logit_scale,
            d2t=self.drafter.d2t,
            draft_tokens=state.draft_tokens,
            draft_logits=state.draft_logits if gumbel else None,
        )
