# SPDX-License-Identifier: Apache-2.0
"""The jobs of one core, and the threads that wait for them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from dflash.engine.core import Core, NewTokens
from dflash.engine.job import Job
from dflash.engine.metrics import Monitor
from dflash.engine.request import Request
from dflash.engine.statistics import Statistics
from dflash.errors import DflashError

logger = logging.getLogger("dflash")


class Jobs:
    """Runs a core on behalf of any number of threads; one at a time has it.

    Whoever waits for a token runs the next step, for all; the others wait until that step is over, and no longer.
    To begin and to end a job never waits: it happens at once, or at the hands of the thread that has
    the core, before or after its step. So an iterator may be closed anywhere: by a coroutine, by
    another thread, by the garbage collector in the middle of a step.

    Args:
        core: no one else's.
        monitor: told of every step and of every sequence that ends.
    """

    def __init__(self, core: Core, monitor: Monitor) -> None:
        self.statistics = Statistics()
        self._core = core
        self._monitor = monitor
        self._job_of: dict[int, Job] = {}  # by request id
        self._asked: deque[Callable[[], None]] = deque()
        self._has_core = threading.Lock()
        self._owner: int | None = None
        # NOTE: its lock is re-entrant: the garbage collector may end a job in a thread that holds it.
        self._released = threading.Condition()

    def __len__(self) -> int:
        """Requests of jobs that were not dropped."""
        return len(self._job_of)

    def submit(self, job: Job) -> None:
        """Begins a job; why it cannot be served becomes its error."""
        self._ask(partial(self._start, job))

    def fail(self, job: Job, error: Exception) -> None:
        """Ends a job with an error."""
        job.failing, job.done = True, False
        self._ask(partial(self._fail, job, error))

    def drop(self, job: Job) -> None:
        """Forgets a job that no one waits for; sequences that have not finished end."""
        self._ask(partial(self._forget, job))

    def step_for(self, job: Job) -> None:
        """A step by this thread, or the end of another thread's; unless the job has news already."""
        if not self._with_core(partial(self._serve, job)):
            self._wait(job)
        self._settle()

    def _serve(self, job: Job) -> None:
        self._carry_out()
        if not job.chunks and not job.done:
            self._step()

    def _wait(self, job: Job) -> None:
        if self._owner == threading.get_ident():
            raise DflashError("the LLM was called from inside one of its own steps")
        with self._released:
            if self._has_core.locked() and not job.chunks and not job.done:
                self._released.wait(1)  # an interrupt may swallow the call

    def _ask(self, action: Callable[[], None]) -> None:
        self._asked.append(action)
        self._settle()

    def _settle(self) -> None:
        """Does what was asked, unless another thread has the core: it settles when it is done."""
        while self._asked and self._with_core(self._carry_out):
            pass

    def _carry_out(self) -> None:
        while self._asked:
            self._asked.popleft()()

    def _with_core(self, work: Callable[[], None]) -> bool:
        """Works with the core, unless another thread has it."""
        taken = False
        try:
            taken = self._has_core.acquire(blocking=False)
            if taken:
                self._owner = threading.get_ident()
                work()
        except Exception:
            raise
        except BaseException as error:
            if taken:
                self._begin_anew(error)
            raise
        finally:
            if taken:
                self._owner = None
                self._has_core.release()
                with self._released:
                    self._released.notify_all()
        return taken

    def _begin_anew(self, error: BaseException) -> None:
        """Where an interrupt fell nothing can be trusted: it leaves blocks without owner and tokens behind."""
        jobs = self._jobs()
        self._core.reset(s.request for job in jobs for s in job.sequences)
        for job in jobs:
            if not job.done:
                self._fail(job, _cause("the engine was interrupted", error))

    def _jobs(self) -> list[Job]:
        return list({id(job): job for job in self._job_of.values()}.values())

    def _start(self, job: Job) -> None:
        if job.dropped:  # its coroutine was cancelled before it began
            return
        try:
            job.start(self._core)
        except Exception as error:
            self._fail(job, error)
        finally:
            for sequence in job.sequences:
                self._job_of[sequence.request.request_id] = job

    def _step(self) -> None:
        new: deque[NewTokens] = deque()
        try:
            assert self._core.scheduler.has_work, "a job waits for requests that no one has"
            new.extend(self._core.step())
            self._monitor.stepped(new)
            while new:
                self._deliver(new[0])
                new.popleft()
        except Exception as error:
            if not self._lose([tokens.request.request_id for tokens in new], error):
                raise
            logger.exception("a step failed")

    def _deliver(self, new: NewTokens) -> None:
        job = self._job_of[new.request.request_id]
        if job.done:  # a sequence of a job that failed in this very step
            return
        try:
            chunk, ended = job.take(new)
        except Exception as error:
            self._fail(job, error)
            return
        for sequence in ended:
            assert sequence.output is not None
            self._core.abort(sequence.request)
            self._count(sequence.request, sequence.output.finish_reason)
        job.hand_over(chunk)

    def _lose(self, undelivered: Sequence[int], error: Exception) -> list[Job]:
        """The jobs of the batch are lost, and get the error; those that still wait are not."""
        lost = []
        for job in self._jobs():
            hit = any(
                s.request.finish_reason == "error" or s.request.request_id in undelivered
                for s in job.sequences
            )
            if hit and not job.done:
                self._fail(job, _cause("a step of the request's batch failed", error))
                lost.append(job)
        return lost

    def _fail(self, job: Job, error: Exception) -> None:
        for sequence in job.fail(error):
            self._core.abort(sequence.request, "error")
            self._count(sequence.request, "error")
        job.end(error)

    def _forget(self, job: Job) -> None:
        job.dropped = True
        for sequence in job.sequences:
            self._job_of.pop(sequence.request.request_id, None)
            if sequence.output is None:
                self._core.abort(sequence.request)
                self._count(sequence.request, "abort")

    def _count(self, request: Request, reason: str) -> None:
        self._monitor.finished(request, reason)
        self.statistics.add(request.statistics)


def _cause(text: str, error: BaseException) -> DflashError:
    failure = DflashError(f"{text}: {error!r}")
    failure.__cause__ = error
    return failure
