# SPDX-License-Identifier: Apache-2.0
"""Which requests run next, and on which blocks; no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dflash.engine.kv_cache import BlockPool
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.statistics import Statistics


@dataclass
class Request:
    """One sequence on its way through the engine."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # params.max_tokens within the model's length
    row: int = -1  # state row, set at admission
    blocks: list[int] = field(default_factory=list)  # set at admission
    num_computed: int = 0  # prompt tokens whose K/V exist
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(frozen=True)
class PrefillChunk:
    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == len(self.request.prompt_token_ids)


class Scheduler:
    """First come, first served. A request is admitted when a state row and all blocks it can ever need are free:
    prompt, max_tokens and 2 * Q slots of lookahead (the verified block and the drafted one).
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_query_per_req: int,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_query_per_req = num_query_per_req
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = deque(range(max_num_seqs))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def slots_for(self, prompt_len: int, max_tokens: int) -> int:
        return prompt_len + max_tokens + 2 * self.num_query_per_req

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its blocks can never be free at once.
        """
        slots = self.slots_for(len(request.prompt_token_ids), request.max_tokens)
        needed, total = self.pool.blocks_for(slots), self.pool.num_blocks - 1
        if needed > total:
            raise ValueError(
                f"a prompt of {len(request.prompt_token_ids)} tokens and max_tokens {request.max_tokens} "
                f"need {needed} cache blocks of {self.pool.kv_block_size}; there are {total}: "
                "lower max_tokens or raise gpu_memory_utilization"
            )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Moves waiting requests to prefill while rows and blocks last; returns the new ones."""
        admitted = []
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            slots = self.slots_for(len(request.prompt_token_ids), request.max_tokens)
            blocks = self.pool.allocate(slots)
            if blocks is None:
                break
            self.waiting.popleft()
            request.blocks, request.row = blocks, self._free_rows.popleft()
            self.prefilling.append(request)
            admitted.append(request)
        return admitted

    def next_prefill(self) -> list[PrefillChunk]:
        """Chunks within the token budget; only the last one may be partial, and then it comes alone."""
        budget, chunks = self.max_num_batched_tokens, []
        for request in self.prefilling:
            length = len(request.prompt_token_ids) - request.num_computed
            if length > budget:
                if chunks:
                    break
                length = budget
            chunks.append(PrefillChunk(request, request.num_computed, length))
            budget -= length
        return chunks

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Records a chunk; a finished prompt starts to run."""
        chunk.request.num_computed += chunk.length
        if chunk.is_last:
            self.prefilling.remove(chunk.request)
            self.running.append(chunk.request)

    def finish(self, request: Request, reason: str) -> None:
        """Gives a request's row and blocks back."""
        request.finish_reason = reason
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        self.pool.free(request.blocks)
        if request.row >= 0:
            self._free_rows.append(request.row)
        request.blocks, request.row = [], -1
