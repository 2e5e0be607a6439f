# SPDX-License-Identifier: Apache-2.0
"""Device state: one row a request, and the arrays of the batch at hand. All at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash.attention.spec import AttentionBatch
from dflash.engine.buckets import PromptBucket
from dflash.engine.request import PrefillChunk, Request, Variant
from dflash.engine.staging import RequestTable, copy_to, to_device

OUTPUT_RING = 4


@dataclass(frozen=True)
class RequestState:
    """How far each request is, by state row (S = max_num_seqs).

    seq_lens is s: committed tokens whose target K/V exist, the position of the bonus token.
    """

    seq_lens: torch.Tensor  # int32 [S]
    last_sampled: torch.Tensor  # int64 [S]: the bonus token
    next_prefill_tokens: torch.Tensor  # int64 [S]: the bonus behind a prefill that samples nothing
    draft_tokens: torch.Tensor  # int64 [S, N]
    num_draft_tokens: torch.Tensor  # int32 [S]
    draft_logits: torch.Tensor | None  # [S, N, V], only for sampled drafts
    tokens_left: torch.Tensor  # int32 [S]
    finished: torch.Tensor  # int32 [S]: 0 running, 1 stop token, 2 length
    step: torch.Tensor  # int64 [1]
    output_ring: torch.Tensor  # int64 [OUTPUT_RING, S, 3 + N + 1]
    host_ring: torch.Tensor  # the same for the host to read: pinned, or output_ring itself

    @classmethod
    def allocate(
        cls,
        max_reqs: int,
        num_speculative_tokens: int,
        device: torch.device,
        draft_logits: tuple[int, torch.dtype] | None = None,
    ) -> RequestState:
        """draft_logits: (vocabulary, dtype) when drafts are sampled and their logits recorded."""
        n = num_speculative_tokens

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        ring = zeros(OUTPUT_RING, max_reqs, n + 4, dtype=torch.int64)
        on_gpu = device.type == "cuda"
        return cls(
            seq_lens=zeros(max_reqs, dtype=torch.int32),
            last_sampled=zeros(max_reqs, dtype=torch.int64),
            next_prefill_tokens=zeros(max_reqs, dtype=torch.int64),
            draft_tokens=zeros(max_reqs, n, dtype=torch.int64),
            num_draft_tokens=zeros(max_reqs, dtype=torch.int32),
            draft_logits=zeros(max_reqs, n, draft_logits[0], dtype=draft_logits[1])
            if draft_logits
            else None,
            tokens_left=zeros(max_reqs, dtype=torch.int32),
            finished=zeros(max_reqs, dtype=torch.int32),
            step=zeros(1, dtype=torch.int64),
            output_ring=ring,
            host_ring=torch.empty(ring.shape, dtype=ring.dtype, pin_memory=True)
            if on_gpu
            else ring,
        )

    def admit(self, requests: Sequence[Request]) -> None:
        """Writes the rows of new and of resumed requests.

        s starts one before a new prompt's end, since its prefill commits one token, and at the bonus
        of a resumed request.
        """
        rows = to_device([request.row for request in requests], torch.int64, self.step.device)

        def write(table: torch.Tensor, values: list) -> None:
            table[rows] = to_device(values, table.dtype, table.device)

        bonus = [r.output_token_ids[-1] if r.is_resumed else 0 for r in requests]
        write(self.seq_lens, [r.num_tokens - 1 for r in requests])
        write(self.last_sampled, bonus)
        write(self.next_prefill_tokens, bonus)
        write(self.tokens_left, [r.max_tokens - len(r.output_token_ids) for r in requests])
        self.num_draft_tokens[rows] = self.draft_tokens.shape[1]
        self.draft_tokens[rows] = -1
        self.finished[rows] = 0


@dataclass(frozen=True)
class Batch:
    """The leading part of BatchBuffers that one pass uses: R requests, T rows.

    The host's fields choose which variant of the step runs; everything else is on the device.
    """

    num_reqs: int
    num_rows: int
    max_query_len: int
    kv_block_size: int
    variant: Variant
    idx_mapping: torch.Tensor  # int32 [R]
    block_table: torch.Tensor  # int32 [R, max_blocks]
    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    seq_lens: torch.Tensor  # int32 [R]
    query_start_loc: torch.Tensor  # int32 [R + 1]
    logits_rows: torch.Tensor | None  # int64 [>= R]: rows that get logits; None = all
    logits_reqs: torch.Tensor | None  # int64 [R]: whose rows they are, beside logits_rows
    logits_start_loc: torch.Tensor  # int32 [R + 1]
    sampled_token_ids: torch.Tensor  # int64 [R, N + 1]
    num_sampled: torch.Tensor  # int32 [R]
    num_rejected: torch.Tensor  # int32 [R]

    def attention(self, max_seq_len: int) -> AttentionBatch:
        """What attention reads of a pass over all rows."""
        return AttentionBatch(
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            max_query_len=self.max_query_len,
            max_seq_len=max_seq_len,
        )


class BatchBuffers:
    """Backing store of every Batch, at its largest size.

    Padded requests are inert (state -1, no rows of a prompt, no keys); rows that pad prompts are behind those of all
    requests and stored nowhere; what pads the rows that get logits is row 0, and no one reads it.

    Args:
        tile_rows: every batch has a multiple of it of rows, and as many that get logits.
    """

    def __init__(
        self,
        max_reqs: int,
        max_rows: int,
        max_blocks: int,
        num_speculative_tokens: int,
        kv_block_size: int,
        device: torch.device,
        tile_rows: int | None = None,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tile_rows = tile_rows
        self.num_query_per_req = num_speculative_tokens + 1
        self.kv_block_size = kv_block_size
        self.requests = RequestTable(max_reqs, max_blocks, device)
        self.idx_mapping, self.block_table = self.requests.idx_mapping, self.requests.block_table
        self.input_ids = zeros(max_rows)
        self.positions = zeros(max_rows)
        self.slot_mapping = zeros(max_rows)
        self.seq_lens = zeros(max_reqs, dtype=torch.int32)
        self.query_start_loc = zeros(max_reqs + 1, dtype=torch.int32)
        self.logits_rows = zeros(self._padded(max_reqs))
        self.logits_reqs = zeros(max_reqs)
        self.logits_start_loc = zeros(max_reqs + 1, dtype=torch.int32)
        self.sampled_token_ids = zeros(max_reqs, self.num_query_per_req)
        self.num_sampled = zeros(max_reqs, dtype=torch.int32)
        self.num_rejected = zeros(max_reqs, dtype=torch.int32)

    def admit(self, requests: Sequence[Request]) -> None:
        """Forgets the blocks of a row's last owner."""
        for request in requests:
            self.requests.reset(request.row)

    def decode(self, requests: Sequence[Request], bucket: int | None = None) -> Batch:
        """A verify batch: Q rows a request, built on the device by build_verify; padded to `bucket` requests."""
        bucket = bucket or len(requests)
        self.requests.send(requests, bucket)
        return self.verify_batch(bucket, Variant.of(requests))

    def verify_batch(self, num_reqs: int, variant: Variant) -> Batch:
        """The arrays of a verify batch of any requests."""
        rows = num_reqs * self.num_query_per_req
        return self._batch(num_reqs, rows, self.num_query_per_req, variant)

    def prefill(self, chunks: Sequence[PrefillChunk], bucket: PromptBucket | None = None) -> Batch:
        """A prompt batch; the last row of a chunk that samples gets logits. Padded to `bucket`, or to whole tiles."""
        requests = [chunk.request for chunk in chunks]
        ids, positions, slots, ends, sample_rows = [], [], [], [0], []
        for chunk in chunks:
            where = range(chunk.start, chunk.start + chunk.length)
            ids += chunk.request.tokens(where.start, where.stop)
            positions += where
            slots += [self._slot(chunk.request.blocks, p) for p in where]
            ends.append(len(ids))
            sample_rows += [len(ids) - 1] if chunk.samples else []
        bucket = bucket or PromptBucket(self._padded(len(ids)), len(chunks))
        num_rows, num_reqs = bucket.num_rows, bucket.num_reqs
        # NOTE: where rows pad, no length that together with num_reqs looks like a batch of equal queries.
        is_padded = num_rows > len(ids)
        longest = num_rows if is_padded else max(chunk.length for chunk in chunks)
        samples = [chunk.samples for chunk in chunks]
        self.requests.send(requests, num_reqs)
        copy_to(self.input_ids, ids, num_rows, 0)
        copy_to(self.positions, positions, num_rows, 0)
        copy_to(self.slot_mapping, slots, num_rows, -1)
        copy_to(self.query_start_loc, ends, num_reqs + 1, len(ids))
        seq_lens = [chunk.start + chunk.length for chunk in chunks]
        copy_to(self.seq_lens, seq_lens, num_reqs, 0)
        copy_to(self.logits_rows, sample_rows, self._padded(num_reqs), 0)
        logits_reqs = [r for r, sample in enumerate(samples) if sample]
        copy_to(self.logits_reqs, logits_reqs, num_reqs, 0)
        logits_ends = [sum(samples[:r]) for r in range(len(samples) + 1)]
        copy_to(self.logits_start_loc, logits_ends, num_reqs + 1, logits_ends[-1])
        variant = Variant.of(requests, drafts=all(chunk.is_last for chunk in chunks))
        return self._batch(num_reqs, num_rows, longest, variant, all_rows=False)

    def _padded(self, count: int) -> int:
        """The next multiple of tile_rows."""
        tile = self.tile_rows or 1
        return -(-count // tile) * tile

    def _slot(self, blocks: list[int], position: int) -> int:
        block, offset = divmod(position, self.kv_block_size)
        return blocks[block] * self.kv_block_size + offset

    def _batch(
        self, reqs: int, rows: int, max_query_len: int, variant: Variant, all_rows: bool = True
    ) -> Batch:
        """all_rows: get logits; else those in logits_rows."""
        logits_start_loc = self.query_start_loc if all_rows else self.logits_start_loc
        return Batch(
            num_reqs=reqs,
            num_rows=rows,
            max_query_len=max_query_len,
            kv_block_size=self.kv_block_size,
            variant=variant,
            idx_mapping=self.idx_mapping[:reqs],
            block_table=self.block_table[:reqs],
            input_ids=self.input_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            seq_lens=self.seq_lens[:reqs],
            query_start_loc=self.query_start_loc[: reqs + 1],
            logits_rows=None if all_rows else self.logits_rows[: self._padded(reqs)],
            logits_reqs=None if all_rows else self.logits_reqs[:reqs],
            logits_start_loc=logits_start_loc[: reqs + 1],
            sampled_token_ids=self.sampled_token_ids[:reqs],
            num_sampled=self.num_sampled[:reqs],
            num_rejected=self.num_rejected[:reqs],
        )
