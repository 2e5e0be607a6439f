# SPDX-License-Identifier: Apache-2.0
"""The engine's core: requests in, committed tokens out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from dflash.engine.buffers import MAX_STOP_TOKEN_IDS, OUTPUT_RING, BatchBuffers
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.scheduler import PrefillChunk, Request, Scheduler
from dflash.engine.step import Step

FINISH_REASONS = {1: "stop", 2: "length"}


@dataclass(frozen=True)
class NewTokens:
    """Tokens one iteration committed for a request; finish_reason is set with the last ones."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None


class Core:
    """Static pieces (step, buffers) driven by the scheduler. One `step` is one prefill batch or one iteration.

    Args:
        step: the parts of an iteration, with the device state.
        batch_buffers: the arrays of the batch at hand.
        scheduler: who runs next.
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
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int = 0,
    ) -> None:
        self._step = step
        self._buffers = batch_buffers
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.seed = seed
        self._num_requests = 0
        self._prefilled = False  # whether the last step was a prefill

    @property
    def num_speculative_tokens(self) -> int:
        return self._buffers.num_query_per_req - 1

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        """Queues a request.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt with no room for an
                output token, or more stop tokens than the device table holds.
        """
        prompt = list(prompt_token_ids)
        self._check_prompt(prompt)
        self._check_stops(params)
        room = self.max_model_len - len(prompt)
        request = Request(self._num_requests, prompt, params, min(params.max_tokens, room))
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

    def _check_stops(self, params: SamplingParams) -> None:
        stops = self._stop_token_ids(params)
        if len(stops) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"{len(stops)} stop tokens (end-of-sequence ones included): at most {MAX_STOP_TOKEN_IDS}"
            )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys([*params.stop_token_ids, *eos]))

    def abort(self, request: Request) -> None:
        """Ends a request that has not finished; its row and blocks are free at once."""
        if request.finish_reason is None:
            self.scheduler.finish(request, "abort")

    def step(self) -> list[NewTokens]:
        """One prefill batch, or one iteration of all running requests; they alternate while both have work.

        An exception ends the requests of the batch at hand: the device may be ahead of the host.
        """
        for request in self.scheduler.admit():
            self._admit(request)
        chunks = [] if self._prefilled and self.scheduler.running else self.scheduler.next_prefill()
        self._prefilled = bool(chunks)
        requests = [chunk.request for chunk in chunks] or list(self.scheduler.running)
        try:
            return self._prefill(chunks) if chunks else self._decode(requests)
        except BaseException:
            for request in requests:
                self.abort(request)
            raise

    def _admit(self, request: Request) -> None:
        params = request.params
        # An odd multiplier spreads request numbers over 64 bits.
        derived = (self.seed + 1 + request.request_id) * 0x9E3779B97F4A7C15
        self._step.state.admit(
            request.row,
            prompt_len=len(request.prompt_token_ids),
            num_draft_tokens=self.num_speculative_tokens,
            temperature=params.temperature,
            seed=params.seed if params.seed is not None else _signed(derived),
            max_tokens=request.max_tokens,
            stop_token_ids=self._stop_token_ids(params),
        )

    def _prefill(self, chunks: list[PrefillChunk]) -> list[NewTokens]:
        started = time.perf_counter()
        requests = [chunk.request for chunk in chunks]
        batch = self._buffers.prefill(
            [request.row for request in requests],
            [request.blocks for request in requests],
            [c.request.prompt_token_ids[c.start : c.start + c.length] for c in chunks],
            [chunk.start for chunk in chunks],
            [chunk.is_last for chunk in chunks],
            all_greedy=_all_greedy(requests),
        )
        self._step.prefill(batch)
        sampled = [chunk.request for chunk in chunks if chunk.is_last]
        rows = self._read(sampled)
        seconds = time.perf_counter() - started
        for chunk in chunks:
            chunk.request.statistics.prefill_seconds += seconds
            self.scheduler.prefilled(chunk)
        for request in sampled:
            request.statistics.num_output_tokens += 1
        return [self._commit(request, row) for request, row in zip(sampled, rows, strict=True)]

    def _decode(self, requests: list[Request]) -> list[NewTokens]:
        if not requests:
            return []
        started = time.perf_counter()
        batch = self._buffers.decode(
            [request.row for request in requests],
            [request.blocks for request in requests],
            all_greedy=_all_greedy(requests),
        )
        self._step.decode(batch)
        rows = self._read(requests)
        seconds = time.perf_counter() - started
        for request, row in zip(requests, rows, strict=True):
            request.statistics.record_step(self.num_speculative_tokens, row[1], seconds)
        return [self._commit(request, row) for request, row in zip(requests, rows, strict=True)]

    def _read(self, requests: list[Request]) -> list[list[int]]:
        """[step, num_sampled, finished, tokens...] of each request, from the last pass."""
        if not requests:
            return []
        state = self._step.state
        step = int(state.step.item()) - 1
        ring = state.output_ring[step % OUTPUT_RING].tolist()
        rows = [ring[request.row] for request in requests]
        assert all(row[0] == step for row in rows), (
            "the output ring was overwritten before it was read"
        )
        return rows

    def _commit(self, request: Request, row: list[int]) -> NewTokens:
        num_sampled, finished = row[1], row[2]
        tokens = row[3 : 3 + num_sampled]
        request.output_token_ids += tokens
        reason = FINISH_REASONS.get(finished)
        if reason is not None:
            self.scheduler.finish(request, reason)
        return NewTokens(request, tokens, reason)


def _all_greedy(requests: list[Request]) -> bool:
    return all(request.params.temperature == 0 for request in requests)


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
