# SPDX-License-Identifier: Apache-2.0
"""The engine's core: requests in, committed tokens out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from dflash.devices import on_device
from dflash.engine.admission import Limits
from dflash.engine.buffers import OUTPUT_RING
from dflash.engine.flight import Flight, PassTimer
from dflash.engine.graphs import GraphRunner
from dflash.engine.outputs import Logprob
from dflash.engine.pacing import PrefillPacer
from dflash.engine.request import PrefillChunk, Request
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.scheduler import Schedule, Scheduler
from dflash.engine.step import Flow
from dflash.errors import DflashError

FINISH_REASONS = {1: "stop", 2: "length"}


@dataclass(frozen=True)
class NewTokens:
    """Tokens one step committed for a request; finish_reason is set with the last ones."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, Logprob]] | None = None
    num_draft_tokens: int = 0  # verified for them


class Core:
    """Static pieces (step, buffers) driven by the scheduler. One `step` enqueues one prefill batch or one iteration.

    On a GPU the host is one pass behind: it enqueues the next before it reads what the last one sampled.

    Args:
        runner: the parts of an iteration, captured or not, with the device state and the batch's arrays.
        scheduler: who runs next.
        pacer: how much of a prompt may delay running requests.
        limits: what a request may be.
    """

    def __init__(
        self,
        runner: GraphRunner,
        scheduler: Scheduler,
        pacer: PrefillPacer,
        limits: Limits,
    ) -> None:
        self._runner = runner
        self._step = runner.step
        self._buffers = runner.buffers
        self.scheduler = scheduler
        self._pacer = pacer
        self.limits = limits
        self._num_requests = 0
        self._num_passes = int(self._step.state.step.item())  # that wrote the output ring
        self.num_iterations = 0
        self._flights: deque[Flight] = deque()
        self._failure: DflashError | None = None

    @property
    def num_speculative_tokens(self) -> int:
        return self._buffers.num_query_per_req - 1

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, seed: int | None = None
    ) -> Request:
        """Queues one sequence; `seed` stands in for params.seed.

        Raises:
            ValueError: what Limits.admit refuses, or more tokens than the cache holds.
        """
        if self._failure is not None:
            raise self._failure
        request = self.limits.admit(self._num_requests, prompt_token_ids, params, seed)
        request.arrived_at = time.perf_counter()
        self.scheduler.add(request)
        self._num_requests += 1
        return request

    def abort(self, request: Request, reason: str = "abort") -> None:
        """Ends a request that has not finished; its row and blocks are free at once."""
        if request.finish_reason is None:
            self.scheduler.finish(request, reason)
        self._leave_the_ended()

    def reset(self, requests: Iterable[Request]) -> None:
        """Ends all requests, which are these, where an interrupt may have fallen anywhere."""
        for request in requests:
            request.finish_reason = request.finish_reason or "error"
        self._forget_flights()
        self.scheduler.reset()

    def step(self) -> list[NewTokens]:
        """Enqueues one prefill batch, or one iteration of all running requests; they alternate while both have work.

        Returns:
            What earlier passes (on a CPU this one) committed.

        Raises:
            Exception: of a pass; the requests in flight end with the reason "error".
            DflashError: a CUDA error: nothing runs any more.
        """
        if self._failure is not None:
            raise self._failure
        with on_device(self._step.state.step.device):
            return self._step_once()

    def _step_once(self) -> list[NewTokens]:
        work, new = None, []
        try:
            if not self.scheduler.can_grow():
                self._read_all(0, new)  # who has to give blocks back must not be in flight
            work = self.scheduler.schedule(self._pacer.budget())
            launched = self._launch(work)
            self._read_all(self._runner.num_steps_ahead if launched else 0, new)
            self._leave_the_ended()
            return new
        except BaseException as error:
            self._fail(work, new, error)
            if self._failure is not None:
                raise self._failure from error
            raise

    def _launch(self, work: Schedule) -> bool:
        """Enqueues the work; False where there is none."""
        self._admit(work.admitted)
        if work.chunks:
            self._flights.append(self._prefill(work.chunks))
            return True
        # Every iteration gives a token: who is out of tokens then has ended by now.
        running = [r for r in work.running if r.tokens_left > r.num_in_flight]
        if running:
            self._flights.append(self._decode(running))
        return bool(running)

    def _read_all(self, num_left: int, new: list[NewTokens]) -> None:
        """Reads passes until num_left are in flight."""
        while len(self._flights) > num_left:
            self._read(self._flights[0], new)
            self._flights.popleft()

    def _leave_the_ended(self) -> None:
        """When all have ended, what is in flight keeps none of them alive, and its time means nothing."""
        if not self.scheduler.has_work:
            self._flights = deque(flight.without_requests() for flight in self._flights)

    def _fail(
        self, work: Schedule | None, undelivered: list[NewTokens], error: BaseException
    ) -> None:
        """Ends the requests of every pass that is under way, and those whose tokens no one will see."""
        lost = [r for flight in self._flights for r in flight.requests]
        lost += [new.request for new in undelivered]
        if work is not None:
            lost += [*work.admitted, *work.running, *(chunk.request for chunk in work.chunks)]
        if is_cuda_error(error):
            numbers = sorted({r.request_id for r in lost})
            buckets = sorted({flight.bucket for flight in self._flights})
            self._failure = DflashError(
                f"the engine stopped at a CUDA error with requests {numbers} in flight, batches padded to {buckets}: "
                f"{str(error).splitlines()[0]}; make a new process"
            )
        for request in lost:
            self.abort(request, "error")
        for new in undelivered:
            new.request.finish_reason = "error"  # also where they were the last ones
        self._forget_flights()

    def _forget_flights(self) -> None:
        for request in (r for flight in self._flights for r in flight.requests):
            request.num_in_flight = 0
        self._flights.clear()
        if self._failure is not None:
            return
        try:  # a pass may have broken off before it counted itself
            self._num_passes = int(self._step.state.step.item())
        except RuntimeError as error:  # the device was lost behind the error that brought us here
            self._failure = DflashError(f"the engine stopped: {error}; make a new process")

    def _admit(self, requests: list[Request]) -> None:
        if not requests:
            return
        self._buffers.admit(requests)
        self._step.state.admit(requests)
        self._step.sampling.admit(
            requests, [self.limits.stop_token_ids(r.params) for r in requests]
        )
        now = time.perf_counter()
        for request in requests:
            if request.is_resumed:
                continue
            request.statistics.queue_seconds = now - request.arrived_at
            request.statistics.num_cached_tokens = request.num_computed

    def _prefill(self, chunks: list[PrefillChunk]) -> Flight:
        timer = PassTimer(self._runner.on_gpu)
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        batch = self._buffers.prefill(chunks, self._runner.prompt_bucket(chunks))
        flow = self._runner.prefill(batch)
        for chunk in chunks:
            self.scheduler.prefilled(chunk)  # later passes run behind this one
        return self._flight(sampled, 1, flow, timer, chunks)

    def _decode(self, requests: list[Request]) -> Flight:
        timer = PassTimer(self._runner.on_gpu)
        batch = self._buffers.decode(requests, self._runner.bucket(len(requests)))
        flow = self._runner.decode(batch)
        self.num_iterations += 1
        return self._flight(requests, self._buffers.num_query_per_req, flow, timer)

    def _flight(
        self,
        requests: list[Request],
        rows_per_req: int,
        flow: Flow,
        timer: PassTimer,
        chunks: Sequence[PrefillChunk] = (),
    ) -> Flight:
        """What was just enqueued."""
        step = self._num_passes
        self._num_passes += flow.batch.variant.drafts  # a pass that only observes writes no ring
        for request in requests:
            request.num_in_flight += 1
        timer.stop()
        return Flight(
            requests, [r.row for r in requests], rows_per_req, step, flow.logprobs,
            chunks, flow.batch.num_reqs, timer,
        )  # fmt: skip

    def _read(self, flight: Flight, new: list[NewTokens]) -> None:
        """Adds what a pass committed, once it has run."""
        seconds = flight.timer.wait()
        if not flight.requests and not flight.chunks:
            return
        if flight.chunks:
            self._pacer.prefilled(sum(chunk.length for chunk in flight.chunks), seconds)
        else:
            self._pacer.decoded(seconds)
        for chunk in flight.chunks:
            chunk.request.statistics.prefill_seconds += seconds
        if not flight.requests:
            return
        ring = self._step.state.host_ring[flight.step % OUTPUT_RING]
        rows = ring[flight.rows].tolist()
        assert all(row[0] == flight.step for row in rows), (
            "the output ring was overwritten before it was read"
        )
        logprobs = None if flight.logprobs is None else flight.logprobs.to_lists()
        for i, (request, row) in enumerate(zip(flight.requests, rows, strict=True)):
            request.num_in_flight -= 1
            if request.finish_reason is not None:  # it ended, or was aborted, in the meantime
                continue
            listed = None
            if logprobs is not None and request.params.logprobs is not None:
                first = i * flight.rows_per_req
                listed = logprobs.listed(first, row[3 : 3 + row[1]], request.params.logprobs)
            new.append(self._commit(request, row, listed, flight, seconds))

    def _commit(
        self,
        request: Request,
        row: list[int],
        logprobs: list[dict[int, Logprob]] | None,
        flight: Flight,
        seconds: float,
    ) -> NewTokens:
        """One request's row of the ring: step, num_sampled, finished, tokens."""
        count, finished, statistics = row[1], row[2], request.statistics
        tokens = row[3 : 3 + count]
        num_draft_tokens = 0 if flight.chunks else self.num_speculative_tokens
        if flight.chunks:
            statistics.num_output_tokens += count
            statistics.num_first_tokens += 1
        else:
            statistics.record_step(num_draft_tokens, count, seconds)
        request.output_token_ids += tokens
        self.scheduler.advanced(request)
        reason = FINISH_REASONS.get(finished)
        if reason is not None:
            self.scheduler.finish(request, reason)
        return NewTokens(request, tokens, reason, logprobs, num_draft_tokens)


def is_cuda_error(error: BaseException) -> bool:
    """Whether the device is lost; being out of memory is not that."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
