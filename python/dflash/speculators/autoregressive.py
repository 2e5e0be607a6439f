# SPDX-License-Identifier: Apache-2.0
"""An ordinary small causal model as drafter: it reads what the target reads, and drafts token by token."""

from __future__ import annotations

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buffers import Batch, RequestState
from dflash.engine.sampling import SamplingState
from dflash.models.decoder import Decoder
from dflash.models.linear import logits_dtype
from dflash.models.target import Target
from dflash.ops.build_verify import build_verify
from dflash.speculators.buffers import DraftBuffers, draft_tokens, query_attention


class AutoregressiveSpeculator:
    """Embedding, head and K/V of its own; one pass over every scheduled row, then N of one row a request.

    Args:
        drafter: a model of the target's vocabulary, caches attached.
        num_speculative_tokens: N.
        max_reqs: largest batch.
        num_states: state rows, S.
        max_model_len: positions are clamped to it.
        target_vocab_size: ids the target knows; a drafter padded further never proposes past them.
        sample_method: "greedy" (argmax) or "gumbel" (a sample of q, recorded for the acceptance).
    """

    target_layer_ids: tuple[int, ...] = ()

    def __init__(
        self,
        drafter: Target,
        num_speculative_tokens: int,
        max_reqs: int,
        num_states: int,
        max_model_len: int,
        target_vocab_size: int,
        sample_method: str = "greedy",
    ) -> None:
        self.drafter = drafter
        self.num_speculative_tokens = num_speculative_tokens
        self.num_query_per_req = num_speculative_tokens + 1
        self.max_model_len = max_model_len
        self.sample_method = sample_method
        known = min(drafter.config.decoder.vocab_size, drafter.lm_head.shape[0])
        self.vocab_size = min(known, target_vocab_size)
        # A target padded further than the drafter may commit ids that have no row here.
        num_embedded = drafter.embed_tokens.shape[0]
        self._last_embedded = num_embedded - 1 if num_embedded < target_vocab_size else None
        device = drafter.lm_head.device
        self.buffers = DraftBuffers.allocate(max_reqs, 1, 1, device)
        self._seq_lens = torch.zeros(num_states, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(num_states, dtype=torch.int64, device=device)

    @property
    def models(self) -> tuple[Target, ...]:
        return (self.drafter,)

    @property
    def observe_eager_reason(self) -> str | None:
        return self.drafter.decoder.eager_reason

    @property
    def propose_eager_reason(self) -> str | None:
        return self.drafter.decoder.eager_reason

    def logits_bytes(self, max_reqs: int) -> int:
        """Of one pass: a row a request."""
        head = self.drafter.lm_head
        return max_reqs * head.shape[0] * logits_dtype(head).itemsize

    def forwards(self, batch: Batch) -> list[tuple[Decoder, AttentionBatch]]:
        rows = self.buffers.of(batch.num_reqs)
        one_row = query_attention(rows, batch, self.max_model_len)
        return [(self.drafter.decoder, a) for a in (batch.attention(self.max_model_len), one_row)]

    def observe(
        self,
        batch: Batch,
        taps: torch.Tensor | None,
        state: RequestState,
        prepare: bool = True,
    ) -> None:
        """The drafter over the target's rows. Those of rejected drafts are overwritten before they are read."""
        self._forward(batch.input_ids, batch.attention(self.max_model_len), prepare)

    def propose(
        self, batch: Batch, state: RequestState, sampling: SamplingState, prepare: bool = True
    ) -> None:
        """Pass i reads the token at s' + i and drafts the one behind it."""
        self._seq_lens.copy_(state.seq_lens)
        self._last_tokens.copy_(state.last_sampled)
        for i in range(self.num_speculative_tokens):
            rows = self._build_rows(batch, state)
            attention = query_attention(rows, batch, self.max_model_len)
            hidden = self._forward(rows.input_ids, attention, prepare)
            draft_tokens(
                self.drafter,
                hidden,
                rows.sample_positions,
                batch.idx_mapping,
                state,
                sampling,
                sample_method=self.sample_method,
                vocab_size=self.vocab_size,
                columns=slice(i, i + 1),
            )
            self._seq_lens.add_(1)
            self._last_tokens.copy_(state.draft_tokens[:, i])

    def _build_rows(self, batch: Batch, state: RequestState) -> DraftBuffers:
        """One row a request: its last token, as a block without drafts."""
        rows = self.buffers.of(batch.num_reqs)
        build_verify(
            batch.idx_mapping,
            self._seq_lens,
            self._last_tokens,
            state.draft_tokens[:, :0],
            batch.block_table,
            kv_block_size=batch.kv_block_size,
            max_model_len=self.max_model_len,
            input_ids=rows.input_ids,
            positions=rows.positions,
            slot_mapping=rows.slot_mapping,
            query_seq_lens=rows.seq_lens,
            query_start_loc=rows.query_start_loc,
        )
        # Not clamped, as the noise wants it: the length is the position behind the row.
        rows.sample_positions.copy_(rows.seq_lens)
        return rows

    def _forward(
        self, input_ids: torch.Tensor, attention: AttentionBatch, prepare: bool
    ) -> torch.Tensor:
        """Hidden states [T, H]."""
        if prepare:
            self.drafter.decoder.prepare(attention)
        if self._last_embedded is not None:
            input_ids = input_ids.clamp(max=self._last_embedded)
        return self.drafter.forward(input_ids, attention)
