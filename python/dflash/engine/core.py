# SPDX-License-Identifier: Apache-2.0
"""The engine's core: requests in, committed tokens out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

from dflash.engine.buffers import OUTPUT_RING, BatchBuffers
from dflash.engine.outputs import Logprob
from dflash.engine.pacing import PrefillPacer
from dflash.engine.request import PrefillChunk, Request
from dflash.engine.sampling import MAX_STOP_TOKEN_IDS, RawLogprobs
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.scheduler import Scheduler
from dflash.engine.step import Step

FINISH_REASONS = {1: "stop", 2: "length"}


@dataclass(frozen=True)
class NewTokens:
    """Tokens one step committed for a request; finish_reason is set with the last ones."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    num_draft_tokens: int = 0  # verified for them


@dataclass(frozen=True)
class _Sampled:
    """What the last pass gave one request: its ring row, and where its logits rows begin."""

    token_ids: list[int]
    finished: int
    first_row: int


class Core:
    """Static pieces (step, buffers) driven by the scheduler. One `step` is one prefill batch or one iteration.

    Args:
        step: the parts of an iteration, with the device state.
        batch_buffers: the arrays of the batch at hand.
        scheduler: who runs next.
        pacer: how much of a prompt may delay running requests.
        max_model_len: prompt and output tokens a request may have.
        vocab_size: ids a prompt may hold.
        eos_token_ids: tokens that end a request unless it ignores them.
        seed: seeds of requests that bring none are derived from it and the request's number.
    """

    def __init__(
        self,
        step: Step,
        batch_buffers: BatchBuffers,
        scheduler: Scheduler,
        pacer: PrefillPacer,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int = 0,
    ) -> None:
        self._step = step
        self._buffers = batch_buffers
        self.scheduler = scheduler
        self._pacer = pacer
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed
        self._num_requests = 0

    @property
    def num_speculative_tokens(self) -> int:
        return self._buffers.num_query_per_req - 1

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, seed: int | None = None
    ) -> Request:
        """Queues one sequence; `seed` stands in for params.seed.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt with no room for an
                output token, more stop tokens than the device table holds, or more tokens than the cache.
        """
        prompt = list(prompt_token_ids)
        self._check_prompt(prompt)
        self._check_ids(params)
        max_tokens = min(params.max_tokens, self.max_model_len - len(prompt))
        number = self._num_requests
        seed = params.seed if seed is None else seed
        request = Request(
            number,
            prompt,
            params,
            max_tokens,
            _derived(self.seed, number) if seed is None else seed,
        )
        request.arrived_at = time.perf_counter()
        request.statistics.num_requests = 1
        request.statistics.num_prompt_tokens = len(prompt)
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("the prompt has no tokens: expected at least one")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for an answer: shorten it or raise max_model_len"
            )
        odd = next((t for t in prompt if not isinstance(t, Integral)), None)
        if odd is not None:
            raise ValueError(f"the prompt holds {odd!r}: expected text or token ids")
        outside = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"prompt token {outside} is outside the vocabulary of {self.vocab_size}"
            )

    def _check_ids(self, params: SamplingParams) -> None:
        stops = self.stop_token_ids(params)
        if len(stops) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"{len(stops)} stop tokens (end-of-sequence ones included): at most {MAX_STOP_TOKEN_IDS}"
            )
        outside = next((t for t in params.logit_bias if t >= self.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"logit_bias token {outside} is outside the vocabulary of {self.vocab_size}"
            )

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end a request: its own and, unless ignored, the model's."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys([*params.stop_token_ids, *eos]))

    def abort(self, request: Request, reason: str = "abort") -> None:
        """Ends a request that has not finished; its row and blocks are free at once."""
        if request.finish_reason is None:
            self.scheduler.finish(request, reason)

    def reset(self, requests: Iterable[Request]) -> None:
        """Ends all requests, which are these, where an interrupt may have fallen anywhere."""
        for request in requests:
            request.finish_reason = request.finish_reason or "error"
        self.scheduler.reset()

    def step(self) -> list[NewTokens]:
        """One prefill batch, or one iteration of all running requests; they alternate while both have work.

        An exception ends the requests of the batch at hand: the device may be ahead of the host.
        """
        work = self.scheduler.schedule(self._pacer.budget())
        requests = [chunk.request for chunk in work.chunks] or work.running
        try:
            self._admit(work.admitted)
            return self._prefill(work.chunks) if work.chunks else self._decode(work.running)
        except BaseException:
            for request in {*requests, *work.admitted}:
                self.abort(request, "error")
            raise

    def _admit(self, requests: list[Request]) -> None:
        if not requests:
            return
        self._buffers.admit(requests)
        self._step.state.admit(requests)
        self._step.sampling.admit(requests, [self.stop_token_ids(r.params) for r in requests])
        now = time.perf_counter()
        for request in requests:
            if request.is_resumed:
                continue
            request.statistics.queue_seconds = now - request.arrived_at
            request.statistics.num_cached_tokens = request.num_computed

    def _prefill(self, chunks: list[PrefillChunk]) -> list[NewTokens]:
        started = time.perf_counter()
        flow = self._step.prefill(self._buffers.prefill(chunks))
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        rows = self._read(sampled, range(len(sampled)))
        seconds = time.perf_counter() - started
        self._pacer.prefilled(sum(chunk.length for chunk in chunks), seconds)
        for chunk in chunks:
            chunk.request.statistics.prefill_seconds += seconds
            self.scheduler.prefilled(chunk)
        for request in sampled:
            request.statistics.num_output_tokens += 1
            request.statistics.num_first_tokens += 1
        return self._commit(sampled, rows, flow.logprobs, 0)

    def _decode(self, requests: list[Request]) -> list[NewTokens]:
        if not requests:
            return []
        started = time.perf_counter()
        flow = self._step.decode(self._buffers.decode(requests))
        q = self._buffers.num_query_per_req
        rows = self._read(requests, range(0, q * len(requests), q))
        seconds = time.perf_counter() - started
        self._pacer.decoded(seconds)
        for request, row in zip(requests, rows, strict=True):
            count = len(row.token_ids)
            request.statistics.record_step(self.num_speculative_tokens, count, seconds)
        return self._commit(requests, rows, flow.logprobs, self.num_speculative_tokens)

    def _read(self, requests: list[Request], first_rows: range) -> list[_Sampled]:
        """What the last pass sampled for each request."""
        if not requests:
            return []
        state = self._step.state
        step = int(state.step.item()) - 1
        ring = state.output_ring[step % OUTPUT_RING].tolist()
        rows = [ring[request.row] for request in requests]
        assert all(row[0] == step for row in rows), (
            "the output ring was overwritten before it was read"
        )
        return [
            _Sampled(row[3 : 3 + row[1]], row[2], first)
            for row, first in zip(rows, first_rows, strict=True)
        ]

    def _commit(
        self,
        requests: list[Request],
        rows: list[_Sampled],
        logprobs: RawLogprobs | None,
        num_draft_tokens: int,
    ) -> list[NewTokens]:
        host = None if logprobs is None else logprobs.to_host()
        new = []
        for request, row in zip(requests, rows, strict=True):
            request.output_token_ids += row.token_ids
            self.scheduler.advanced(request)
            reason = FINISH_REASONS.get(row.finished)
            if reason is not None:
                self.scheduler.finish(request, reason)
            wanted = request.params.logprobs
            listed = None
            if host is not None and wanted is not None:
                listed = host.listed(row.first_row, row.token_ids, wanted)
            new.append(NewTokens(request, row.token_ids, reason, listed, num_draft_tokens))
        return new


def _derived(seed: int, number: int) -> int:
    """64 signed bits; an odd multiplier spreads request numbers over them."""
    value = (seed + 1 + number) * 0x9E3779B97F4A7C15 % 2**64
    return value - 2**64 if value >= 2**63 else value
