# SPDX-License-Identifier: Apache-2.0
"""Which requests run next, and on which blocks; no tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dflash.engine.kv_cache import ROOT_PREFIX, BlockPool
from dflash.engine.request import PrefillChunk, Request


@dataclass(frozen=True)
class Schedule:
    """The work of one step: prompt chunks, or one iteration of the running requests; never both."""

    admitted: list[Request]
    chunks: list[PrefillChunk]
    running: list[Request]


class Scheduler:
    """First come, first served, over max_num_seqs state rows and the blocks of a pool.

    A request is admitted when a row is free and the pool has blocks for the tokens it has and the slots that
    its next iteration writes: s .. s + 2Q - 1 (the verified block and the drafted one), and Q more for each pass
    that the host does not wait for, since s is then behind. It grows block
    by block; when the pool is empty, the request that came last gives everything back and waits again, before all that
    came later: its tokens stay, their K/V are computed again. So the oldest request always advances, and
    every request that fits alone ends.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_query_per_req: int,
        num_steps_ahead: int = 0,
    ) -> None:
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_lookahead_slots = (2 + num_steps_ahead) * num_query_per_req
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self.reset()

    def reset(self) -> None:
        """Forgets every request and every prefix, whatever half of a change they are in."""
        self.pool.reset()
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = deque(range(self._max_num_seqs))
        self._prefilled = False  # whether the last step was a prefill

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its blocks can never be free at once.
        """
        prompt = len(request.prompt_token_ids)
        slots = prompt + request.max_tokens + self.num_lookahead_slots
        needed, total = self.pool.blocks_for(slots), self.pool.num_blocks - 1
        if needed > total:
            raise ValueError(
                f"a prompt of {prompt} tokens and max_tokens {request.max_tokens} "
                f"need {needed} cache blocks of {self.pool.kv_block_size}; there are {total}: "
                "lower max_tokens or raise num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
            )
        self.waiting.append(request)

    def can_grow(self) -> bool:
        """Whether every running request gets the blocks of its next iteration without taking another's."""
        return self._growth() <= self.pool.num_free

    def schedule(self, prefill_budget: int | None = None) -> Schedule:
        """The next step's work; prefill and iterations alternate while both have some.

        Args:
            prefill_budget: prompt tokens that may delay the running requests, within max_num_batched_tokens.
        """
        admitted = self._admit()
        if self.prefilling and not (self._prefilled and self.running):
            budget = self.max_num_batched_tokens
            if self.running and prefill_budget is not None:
                budget = max(1, min(budget, prefill_budget))
            self._prefilled = True
            return Schedule(admitted, self._chunks(budget), [])
        self._prefilled = False
        self._grow_running()
        return Schedule(admitted, [], list(self.running))

    def prefilled(self, chunk: PrefillChunk) -> None:
        """Records that a chunk's K/V exist; a finished prompt starts to run."""
        request, is_last = chunk.request, chunk.is_last
        request.num_computed += chunk.length
        self._publish(request)
        if is_last:
            self.prefilling.remove(request)
            self.running.append(request)

    def advanced(self, request: Request) -> None:
        """Records that a request has new tokens: all but the last, the bonus, have K/V."""
        request.num_computed = request.num_tokens - 1
        self._publish(request)

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request, wherever it is; its row and blocks are free at once."""
        request.finish_reason = reason
        for queue in (self.waiting, self.prefilling, self.running):
            if request in queue:
                queue.remove(request)
        self._release(request)

    def _admit(self) -> list[Request]:
        """Never on blocks that running requests need next: the newcomer would have to give them back at once."""
        admitted, reserved = [], self._growth()
        while self.waiting and self._free_rows and self._take_blocks(self.waiting[0], reserved):
            request = self.waiting.popleft()
            request.row = self._free_rows.popleft()
            self.prefilling.append(request)
            admitted.append(request)
        return admitted

    def _take_blocks(self, request: Request, reserved: int) -> bool:
        """Known blocks from the prefix cache, fresh ones for the rest; all or none, and `reserved` stay free."""
        length = request.prefill_len
        # At least one token is computed: its row proposes, and samples where nothing is known yet.
        known = self.pool.match(request.tokens(0, length), length - 1)
        self.pool.share(known.blocks)
        count = self.pool.blocks_for(length + self.num_lookahead_slots) - len(known.blocks)
        fits = count + reserved <= self.pool.num_free
        fresh = self.pool.allocate(count) if fits else None
        if fresh is None:
            self.pool.free(known.blocks)
            return False
        request.blocks = known.blocks + fresh
        request.num_published, request.prefix_id = len(known.blocks), known.prefix_id
        request.num_computed = len(known.blocks) * self.pool.kv_block_size
        return True

    def _chunks(self, budget: int) -> list[PrefillChunk]:
        """Chunks within the token budget; only the last one may be partial, and then it comes alone."""
        chunks = []
        for request in self.prefilling:
            length = request.prefill_len - request.num_computed
            if length > budget:
                if chunks:
                    break
                length = budget
            chunks.append(PrefillChunk(request, request.num_computed, length))
            budget -= length
            if budget == 0:
                break
        return chunks

    def _grow_running(self) -> None:
        """Every running request gets the blocks of its next iteration, the oldest first."""
        self.running.sort(key=lambda request: request.request_id)
        for request in list(self.running):
            while request.row >= 0 and not self._grow(request):
                self._preempt(self._latest())

    def _grow(self, request: Request) -> bool:
        missing = self._missing_blocks(request)
        if missing <= 0:
            return True
        blocks = self.pool.allocate(missing)
        request.blocks += blocks or []
        return blocks is not None

    def _growth(self) -> int:
        """Blocks that the next iteration of all running requests needs on top of theirs."""
        return sum(max(0, self._missing_blocks(request)) for request in self.running)

    def _missing_blocks(self, request: Request) -> int:
        slots = request.num_computed + self.num_lookahead_slots
        return self.pool.blocks_for(slots) - len(request.blocks)

    def _latest(self) -> Request:
        return max((*self.running, *self.prefilling), key=lambda request: request.request_id)

    def _preempt(self, request: Request) -> None:
        queue = self.running if request in self.running else self.prefilling
        queue.remove(request)
        self._release(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1
        request.statistics.num_preemptions += 1

    def _release(self, request: Request) -> None:
        self.pool.free(request.blocks)
        if request.row >= 0:
            self._free_rows.append(request.row)
        request.row, request.blocks, request.num_computed = -1, [], 0
        request.num_published, request.prefix_id = 0, ROOT_PREFIX

    def _publish(self, request: Request) -> None:
        """Full blocks whose positions are all < s enter the prefix cache; later ones hold scratch."""
        size = self.pool.kv_block_size
        for i in range(request.num_published, request.num_computed // size):
            tokens = request.tokens(i * size, (i + 1) * size)
            request.prefix_id = self.pool.publish(request.prefix_id, tokens, request.blocks[i])
            request.num_published += 1
