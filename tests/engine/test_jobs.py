# SPDX-License-Identifier: Apache-2.0
"""Threads and coroutines that come, wait, fail and leave while others have the core."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from itertools import pairwise

import pytest

from dflash.errors import DflashError
from tests.support.engine import greedy_params, make_llm

from .conftest import NUM_TOKENS, PROMPTS


@pytest.fixture
def llm(target, draft):
    return make_llm(target, draft, max_model_len=512, max_num_seqs=8)


def idle(llm) -> bool:
    scheduler = llm.core.scheduler
    nothing = not scheduler.has_work and not llm._jobs
    return nothing and scheduler.pool.num_free == scheduler.pool.num_blocks - 1


class SlowStep:
    """Every step waits for `gate`, and is counted."""

    def __init__(self, llm, monkeypatch, seconds: float = 0.0) -> None:
        self.count = 0
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self._seconds, self._step = seconds, llm.core.step
        monkeypatch.setattr(llm.core, "step", self)

    def __call__(self):
        self.count += 1
        self.entered.set()
        assert self.gate.wait(60)
        time.sleep(self._seconds)  # lets go of the interpreter, as a step's matrices do
        return self._step()


def test_a_thread_that_steps_all_the_time_starves_no_one(llm, monkeypatch, answers):
    """Chunks reach a coroutine in the step that made them, or in the next few."""
    slow = SlowStep(llm, monkeypatch, seconds=0.005)
    busy = threading.Thread(target=llm.generate, args=(PROMPTS[1], greedy_params(300)))
    busy.start()
    slow.entered.wait()
    tokens, seen = [], [slow.count]

    async def client() -> None:
        async for chunk in llm.stream_async(PROMPTS[0], greedy_params(NUM_TOKENS)):
            tokens.extend(chunk.token_ids)
            seen.append(slow.count)

    asyncio.run(client())
    assert busy.is_alive()
    busy.join()
    assert tokens == answers[0]
    assert max(b - a for a, b in pairwise(seen)) < 10
    assert idle(llm)


def test_closing_a_stream_does_not_wait_for_a_step(llm, monkeypatch, answers):
    """Else the garbage collector, in a thread that holds a lock the step wants, would wait for ever."""
    slow = SlowStep(llm, monkeypatch)
    stream = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
    next(stream)
    slow.gate.clear()
    slow.entered.clear()
    outputs = []
    busy = threading.Thread(
        target=lambda: outputs.extend(llm.generate(PROMPTS[1], greedy_params(NUM_TOKENS)))
    )
    busy.start()
    slow.entered.wait()
    closing = threading.Thread(target=stream.close)
    closing.start()
    closing.join(10)
    waited = closing.is_alive()
    slow.gate.set()
    busy.join()
    assert not waited
    assert outputs[0].outputs[0].token_ids == answers[1] and idle(llm)


@pytest.mark.parametrize("num_turns", range(4))
def test_a_coroutine_cancelled_at_the_start_leaves_nothing(num_turns, llm):
    async def client() -> None:
        async for _ in llm.stream_async(PROMPTS[0], greedy_params(400)):
            pass

    async def run() -> None:
        tasks = [asyncio.create_task(client()) for _ in range(4)]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        for task in tasks * 2:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    llm._worker.submit(lambda: None).result()
    assert idle(llm)


def test_a_second_cancellation_does_not_save_a_request(llm, monkeypatch):
    """The request ends although its coroutine was cancelled again while the worker was in a step."""
    slow = SlowStep(llm, monkeypatch)

    async def client() -> None:
        async for _ in llm.stream_async(PROMPTS[0], greedy_params(400)):
            pass

    async def run() -> None:
        task = asyncio.create_task(client())
        while slow.count < 3:
            await asyncio.sleep(0.001)
        slow.gate.clear()
        slow.entered.clear()
        await asyncio.to_thread(slow.entered.wait, 60)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.001)
        slow.gate.set()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    llm._worker.submit(lambda: None).result()
    assert idle(llm)


def test_a_failing_tokenizer_fails_its_prompt_alone(llm, monkeypatch, answers):
    def encode(*_, **__):
        raise RuntimeError("already borrowed")

    monkeypatch.setattr(llm.tokenizer, "encode", encode, raising=False)
    good, bad = llm.generate([PROMPTS[0], "w3"], greedy_params(NUM_TOKENS))
    assert good.outputs[0].token_ids == answers[0]
    assert bad.outputs[0].finish_reason == "error" and "borrowed" in str(bad.outputs[0].error)
    assert idle(llm)


def test_an_interrupt_between_step_and_delivery_ends_its_batch(llm, monkeypatch, answers):
    """Tokens that were committed and not handed over would be missing in the middle of a stream."""
    other = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
    next(other)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm._jobs._monitor, "stepped", interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:  # prefill and iterations alternate
                llm.generate(PROMPTS[0], greedy_params(NUM_TOKENS))
    with pytest.raises(DflashError, match="KeyboardInterrupt"):
        for _ in range(2 * NUM_TOKENS):
            next(other)
    assert idle(llm)
    assert llm.generate(PROMPTS[0], greedy_params(NUM_TOKENS))[0].outputs[0].token_ids == answers[0]


@pytest.mark.parametrize("where", ["allocate", "free", "publish", "share"])
def test_an_interrupt_in_the_bookkeeping_leaks_nothing(where, llm, monkeypatch, answers):
    """Blocks that were taken and not noted down yet are no one's."""
    llm.generate([PROMPTS[3] * 3], greedy_params(NUM_TOKENS))  # a prefix to share
    waiting = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
    next(waiting)
    pool = llm.core.scheduler.pool
    whole = getattr(pool, where)

    def interrupted(*arguments):
        whole(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPTS[3] * 3], greedy_params(NUM_TOKENS))
    with pytest.raises(DflashError, match="interrupted: KeyboardInterrupt"):
        list(waiting)
    assert idle(llm) and len(llm.core.scheduler._free_rows) == 8
    assert llm.generate(PROMPTS[0], greedy_params(NUM_TOKENS))[0].outputs[0].token_ids == answers[0]


def test_a_call_from_inside_a_step_is_an_error_and_no_deadlock(llm, monkeypatch):
    monkeypatch.setattr(llm.core, "step", lambda: llm.generate([3], greedy_params(1)))
    with pytest.raises(DflashError, match="from inside one of its own steps"):
        llm.generate(PROMPTS[0], greedy_params(4))


def test_a_callback_may_call_the_llm(llm, answers):
    nested = []

    def callback(number, chunk):
        if chunk.finished is not None and number == 0:
            nested.extend(llm.generate(PROMPTS[2], greedy_params(NUM_TOKENS)))

    outputs = llm.generate(PROMPTS[:2], greedy_params(NUM_TOKENS), callback)
    assert [o.outputs[0].token_ids for o in outputs] == answers[:2]
    assert nested[0].outputs[0].token_ids == answers[2] and idle(llm)


def test_a_job_is_done_when_its_last_chunk_is_there(llm):
    """Another thread may look at any time; it would miss the chunk."""
    job = llm._job(PROMPTS[0], greedy_params(6))
    seen = []

    class Chunks(deque):
        def append(self, chunk):
            seen.append(job.done)
            super().append(chunk)

    job.chunks = Chunks()
    llm._jobs.submit(job)
    while not job.done:
        job.chunks.clear()
        llm._jobs.step_for(job)
    assert job.chunks[-1].finished is not None and not any(seen)
    llm._jobs.drop(job)
    assert idle(llm)


def test_the_statistics_count_every_sequence_however_it_ended(target, draft, answers):
    """Finished, failed, closed in the batch, closed before it was admitted."""
    llm = make_llm(target, draft, max_num_seqs=1)

    def callback(number, chunk):
        if number == 1:
            raise KeyError("callback")

    outputs = llm.generate(PROMPTS[:2], greedy_params(8), callback)
    streams = [llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS)) for _ in range(2)]
    closed = len(next(streams[0]).token_ids)
    job = llm._job(PROMPTS[1], greedy_params(8))
    llm._jobs.submit(job)
    llm._jobs.drop(job)
    for stream in streams:
        stream.close()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    statistics = llm.statistics
    assert statistics.num_requests == 4 and statistics.num_first_tokens == 3
    assert statistics.num_output_tokens == tokens + closed
    assert statistics.tokens_per_second >= 0 and idle(llm)
