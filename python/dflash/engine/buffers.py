# SPDX-License-Identifier: Apache-2.0
"""Device state: one row a request, and the arrays of the batch at hand. All at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_STOP_TOKEN_IDS = 16
OUTPUT_RING = 4


@dataclass(frozen=True)
class RequestState:
    """What the device knows of each request, by state row (S = max_num_seqs).

    seq_lens is s: committed tokens whose target K/V exist, the position of the bonus token.
    """

    seq_lens: torch.Tensor  # int32 [S]
    last_sampled: torch.Tensor  # int64 [S]: the bonus token
    next_prefill_tokens: torch.Tensor  # int64 [S]
    draft_tokens: torch.Tensor  # int64 [S, N]
    num_draft_tokens: torch.Tensor  # int32 [S]
    draft_logits: torch.Tensor | None  # [S, N, V], only for sampled drafts
    temperatures: torch.Tensor  # float32 [S]
    seeds: torch.Tensor  # int64 [S]
    tokens_left: torch.Tensor  # int32 [S]
    finished: torch.Tensor  # int32 [S]: 0 running, 1 stop token, 2 length
    stop_token_ids: torch.Tensor  # int64 [S, MAX_STOP_TOKEN_IDS], -1 = unused
    step: torch.Tensor  # int64 [1]
    output_ring: torch.Tensor  # int64 [OUTPUT_RING, S, 3 + N + 1]

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

        return cls(
            seq_lens=zeros(max_reqs, dtype=torch.int32),
            last_sampled=zeros(max_reqs, dtype=torch.int64),
            next_prefill_tokens=zeros(max_reqs, dtype=torch.int64),
            draft_tokens=zeros(max_reqs, n, dtype=torch.int64),
            num_draft_tokens=zeros(max_reqs, dtype=torch.int32),
            draft_logits=zeros(max_reqs, n, draft_logits[0], dtype=draft_logits[1])
            if draft_logits
            else None,
            temperatures=zeros(max_reqs, dtype=torch.float32),
            seeds=zeros(max_reqs, dtype=torch.int64),
            tokens_left=zeros(max_reqs, dtype=torch.int32),
            finished=zeros(max_reqs, dtype=torch.int32),
            stop_token_ids=zeros(max_reqs, MAX_STOP_TOKEN_IDS, dtype=torch.int64).fill_(-1),
            step=zeros(1, dtype=torch.int64),
            output_ring=zeros(OUTPUT_RING, max_reqs, n + 4, dtype=torch.int64),
        )

    def admit(
        self,
        row: int,
        *,
        prompt_len: int,
        num_draft_tokens: int,
        temperature: float,
        seed: int,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        """Writes a new request's row. s starts one before the prompt's end: prefill commits one token."""
        self.seq_lens[row] = prompt_len - 1
        self.num_draft_tokens[row] = num_draft_tokens
        self.draft_tokens[row] = -1
        self.temperatures[row] = temperature
        self.seeds[row] = seed
        self.tokens_left[row] = max_tokens
        self.finished[row] = 0
        stops = list(stop_token_ids) + [-1] * (MAX_STOP_TOKEN_IDS - len(stop_token_ids))
        self.stop_token_ids[row] = torch.tensor(stops, device=self.stop_token_ids.device)


@dataclass(frozen=True)
class Batch:
    """The leading part of BatchBuffers that one pass uses: R requests, T rows.

    all_greedy chooses which variant of the step runs; everything else is on the device.
    """

    num_reqs: int
    num_rows: int
    max_query_len: int
    kv_block_size: int
    all_greedy: bool
    idx_mapping: torch.Tensor  # int32 [R]
    block_table: torch.Tensor  # int32 [R, max_blocks]
    input_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slot_mapping: torch.Tensor  # int64 [T]
    seq_lens: torch.Tensor  # int32 [R]
    query_start_loc: torch.Tensor  # int32 [R + 1]
    logits_rows: torch.Tensor | None  # int64 [n]: rows that get logits; None = all
    logits_start_loc: torch.Tensor  # int32 [R + 1]
    sampled_token_ids: torch.Tensor  # int64 [R, N + 1]
    num_sampled: torch.Tensor  # int32 [R]
    num_rejected: torch.Tensor  # int32 [R]


class BatchBuffers:
    """Backing store of every Batch, at its largest size."""

    def __init__(
        self,
        max_reqs: int,
        max_rows: int,
        max_blocks: int,
        num_speculative_tokens: int,
        kv_block_size: int,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.num_query_per_req = num_speculative_tokens + 1
        self.kv_block_size = kv_block_size
        self.idx_mapping = zeros(max_reqs, dtype=torch.int32)
        self.block_table = zeros(max_reqs, max_blocks, dtype=torch.int32)
        self.input_ids = zeros(max_rows)
        self.positions = zeros(max_rows)
        self.slot_mapping = zeros(max_rows)
        self.seq_lens = zeros(max_reqs, dtype=torch.int32)
        self.query_start_loc = zeros(max_reqs + 1, dtype=torch.int32)
        self.logits_rows = zeros(max_reqs)
        self.logits_start_loc = zeros(max_reqs + 1, dtype=torch.int32)
        self.sampled_token_ids = zeros(max_reqs, self.num_query_per_req)
        self.num_sampled = zeros(max_reqs, dtype=torch.int32)
        self.num_rejected = zeros(max_reqs, dtype=torch.int32)

    def decode(
        self, idx_mapping: list[int], block_tables: list[list[int]], all_greedy: bool
    ) -> Batch:
        """A verify batch: Q rows a request, built on the device by build_verify."""
        self._set_requests(idx_mapping, block_tables)
        reqs = len(idx_mapping)
        rows = reqs * self.num_query_per_req
        return self._batch(
            reqs, rows, self.num_query_per_req, all_greedy, None, self.query_start_loc
        )

    def prefill(
        self,
        idx_mapping: list[int],
        block_tables: list[list[int]],
        chunks: list[list[int]],
        starts: list[int],
        samples: list[bool],
        all_greedy: bool,
    ) -> Batch:
        """A prompt batch: chunk r holds the tokens at positions starts[r]..; samples[r] = its last one."""
        self._set_requests(idx_mapping, block_tables)
        ids, positions, slots, ends, sample_rows = [], [], [], [0], []
        for blocks, chunk, start, sample in zip(block_tables, chunks, starts, samples, strict=True):
            where = range(start, start + len(chunk))
            ids += chunk
            positions += where
            slots += [
                blocks[p // self.kv_block_size] * self.kv_block_size + p % self.kv_block_size
                for p in where
            ]
            ends.append(len(ids))
            sample_rows += [len(ids) - 1] if sample else []
        _copy(self.input_ids, ids)
        _copy(self.positions, positions)
        _copy(self.slot_mapping, slots)
        _copy(self.query_start_loc, ends)
        _copy(self.seq_lens, [s + len(c) for s, c in zip(starts, chunks, strict=True)])
        _copy(self.logits_rows, sample_rows)
        _copy(self.logits_start_loc, [sum(samples[:r]) for r in range(len(samples) + 1)])
        longest = max(len(chunk) for chunk in chunks)
        rows = self.logits_rows[: len(sample_rows)]
        return self._batch(len(chunks), len(ids), longest, all_greedy, rows, self.logits_start_loc)

    def _set_requests(self, idx_mapping: list[int], block_tables: list[list[int]]) -> None:
        width = self.block_table.shape[1]
        padded = [blocks + [0] * (width - len(blocks)) for blocks in block_tables]
        _copy(self.idx_mapping, idx_mapping)
        _copy(self.block_table, padded)

    def _batch(
        self,
        reqs: int,
        rows: int,
        max_query_len: int,
        all_greedy: bool,
        logits_rows: torch.Tensor | None,
        logits_start_loc: torch.Tensor,
    ) -> Batch:
        return Batch(
            num_reqs=reqs,
            num_rows=rows,
            max_query_len=max_query_len,
            kv_block_size=self.kv_block_size,
            all_greedy=all_greedy,
            idx_mapping=self.idx_mapping[:reqs],
            block_table=self.block_table[:reqs],
            input_ids=self.input_ids[:rows],
            positions=self.positions[:rows],
            slot_mapping=self.slot_mapping[:rows],
            seq_lens=self.seq_lens[:reqs],
            query_start_loc=self.query_start_loc[: reqs + 1],
            logits_rows=logits_rows,
            logits_start_loc=logits_start_loc[: reqs + 1],
            sampled_token_ids=self.sampled_token_ids[:reqs],
            num_sampled=self.num_sampled[:reqs],
            num_rejected=self.num_rejected[:reqs],
        )


def _copy(buffer: torch.Tensor, values: list) -> None:
    """The leading part of a device buffer from host values."""
    if values:
        buffer[: len(values)].copy_(torch.tensor(values, dtype=buffer.dtype))
