# SPDX-License-Identifier: Apache-2.0
"""DFlash: observe every scheduled row, propose a block in one pass."""

from __future__ import annotations

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buffers import Batch, RequestState
from dflash.engine.sampling import SamplingState
from dflash.models.decoder import Decoder
from dflash.models.drafter import Drafter
from dflash.models.linear import logits_dtype
from dflash.ops.build_query import build_query
from dflash.speculators.buffers import DraftBuffers, draft_tokens, query_attention


class DFlashSpeculator:
    """K/V from the target's taps; one pass over [bonus, mask x N].

    Args:
        drafter: the draft model, caches attached.
        num_speculative_tokens: N; a query block has N + 1 rows.
        max_rows, max_reqs: largest batch.
        max_model_len: positions are clamped to it.
        target_vocab_size: ids the target knows; a drafter padded further never proposes past them.
        sample_method: "greedy" (argmax) or "gumbel" (a sample of q, recorded for the acceptance).
    """

    observe_eager_reason: str | None = None

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
        device, num_samples = drafter.lm_head.device, max_reqs * num_speculative_tokens
        self.buffers = DraftBuffers.allocate(
            max_reqs, self.num_query_per_req, num_speculative_tokens, device
        )
        self.context_positions = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.context_slot_mapping = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sample_rows = torch.zeros(num_samples, dtype=torch.int64, device=device)
        self.sample_idx_mapping = torch.zeros(num_samples, dtype=torch.int32, device=device)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids

    @property
    def models(self) -> tuple[Drafter, ...]:
        return (self.drafter,)

    @property
    def propose_eager_reason(self) -> str | None:
        return self.drafter.decoder.eager_reason

    def logits_bytes(self, max_reqs: int) -> int:
        """Of all mask rows at once."""
        head = self.drafter.lm_head
        return max_reqs * self.num_speculative_tokens * head.shape[0] * logits_dtype(head).itemsize

    def forwards(self, batch: Batch) -> list[tuple[Decoder, AttentionBatch]]:
        rows = self.buffers.of(batch.num_reqs)
        return [(self.drafter.decoder, query_attention(rows, batch, self.max_model_len))]

    def observe(
        self,
        batch: Batch,
        taps: torch.Tensor | None,
        state: RequestState,
        prepare: bool = True,
    ) -> None:
        """Stores every draft layer's K/V of the batch's rows from their taps; rejected rows are skipped."""
        assert taps is not None
        self._build_rows(batch, state)
        rows = batch.num_rows
        self.drafter.store_context(
            self.drafter.combine(taps[:rows]),
            self.context_positions[:rows],
            self.context_slot_mapping[:rows],
        )

    def propose(
        self, batch: Batch, state: RequestState, sampling: SamplingState, prepare: bool = True
    ) -> None:
        """The mask rows' tokens, over the query block that observe has built."""
        rows, samples = self.buffers.of(batch.num_reqs), self._num_samples(batch)
        attention = query_attention(rows, batch, self.max_model_len)
        if prepare:
            self.drafter.decoder.prepare(attention)
        hidden = self.drafter.forward(rows.input_ids, attention)
        hidden = hidden.index_select(0, self.sample_rows[:samples])
        draft_tokens(
            self.drafter,
            hidden,
            rows.sample_positions,
            self.sample_idx_mapping[:samples],
            state,
            sampling,
            sample_method=self.sample_method,
            vocab_size=self.vocab_size,
            logit_scale=self.drafter.config.logit_scale,
            d2t=self.drafter.d2t,
        )

    def _num_samples(self, batch: Batch) -> int:
        return batch.num_reqs * self.num_speculative_tokens

    def _build_rows(self, batch: Batch, state: RequestState) -> None:
        """Context rows and the query block of the batch the target has just verified."""
        query = self.buffers.of(batch.num_reqs)
        rows, samples = batch.num_rows, self._num_samples(batch)
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
            context_positions=self.context_positions[:rows],
            context_slot_mappings=[self.context_slot_mapping[:rows]],
            query_input_ids=query.input_ids,
            query_positions=query.positions,
            query_slot_mappings=[query.slot_mapping],
            query_seq_lens=query.seq_lens,
            draft_query_start_loc=query.query_start_loc,
            sample_rows=self.sample_rows[:samples],
            sample_positions=query.sample_positions,
            sample_idx_mapping=self.sample_idx_mapping[:samples],
        )
