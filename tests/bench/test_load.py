# SPDX-License-Identifier: Apache-2.0
"""The load generator on a clock that jumps: what arrives when, and what is noted of it."""

import asyncio
from itertools import pairwise
from statistics import fmean

import pytest

from dflash.bench.load import ClosedLoop, PoissonArrivals, parse_loads, run_load
from dflash.bench.metrics import summarize

from .fake import BOOM, PREFILL, STEP, FakeLLM, SamplingParams, run_fast


def measure(load, prompts, max_tokens=4, draft=None):
    llm, records = FakeLLM(draft=draft), []
    params = [SamplingParams(max_tokens=max_tokens)] * len(prompts)
    run_fast(run_load(llm, load, prompts, params, records))
    return llm, records


def test_one_client_sends_the_next_request_when_the_last_is_answered():
    llm, records = measure(ClosedLoop(1), ["a", "b", "c"])
    one = PREFILL + 3 * STEP
    assert [r.arrival for r in records] == pytest.approx([0, one, 2 * one])
    assert [prompt for prompt, _ in llm.asked] == ["a", "b", "c"]
    times, counts = zip(*records[0].chunks, strict=True)
    assert times == pytest.approx([PREFILL + i * STEP for i in range(4)])
    assert counts == (1, 1, 1, 1)
    assert records[0].finished == pytest.approx(one)


@pytest.mark.parametrize("concurrency,most", [(1, 1), (2, 2), (3, 3), (7, 7), (20, 10)])
def test_concurrency_is_reached_and_never_exceeded(concurrency, most):
    llm, records = measure(ClosedLoop(concurrency), [str(i) for i in range(10)])
    assert llm.most_running == most
    assert len(records) == 10
    assert sorted(prompt for prompt, _ in llm.asked) == [str(i) for i in range(10)]


def test_poisson_arrivals_are_the_same_for_one_seed():
    a, b = PoissonArrivals(2.0, seed=1), PoissonArrivals(2.0, seed=1)
    assert a.arrivals(50) == b.arrivals(50)
    assert a.arrivals(50) != PoissonArrivals(2.0, seed=2).arrivals(50)
    assert a.arrivals(10) == a.arrivals(50)[:10]


def test_poisson_gaps_are_exponential():
    times = PoissonArrivals(4.0, seed=0).arrivals(4001)
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0.0
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    # Memoryless: the share past the mean is 1 / e.
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_poisson_requests_do_not_wait_for_each_other():
    load = PoissonArrivals(100.0, seed=3)
    llm, records = measure(load, ["x"] * 8)
    assert [r.arrival for r in records] == pytest.approx(load.arrivals(8))
    assert llm.most_running == 8
    assert summarize(records).ttft_ms.p99 == pytest.approx(1e3 * PREFILL)


def test_time_to_first_token_counts_from_when_a_request_was_due():
    """A loop that was busy when the timer fired starts the request late: the wait is in TTFT."""
    load, records = PoissonArrivals(1.0, seed=0), []
    llm, due = FakeLLM(), PoissonArrivals(1.0, seed=0).arrivals(2)[1]

    async def run():
        loop = asyncio.get_running_loop()
        loop.call_later(due / 2, lambda: setattr(loop, "now", due + 3.0))
        await run_load(llm, load, ["a", "b"], [SamplingParams()] * 2, records)

    run_fast(run())
    late = max(records, key=lambda r: r.arrival)
    assert late.arrival == pytest.approx(due)
    assert late.chunks[0][0] - late.arrival == pytest.approx(3.0 + PREFILL)


def test_a_failing_request_is_counted_and_the_rest_go_on():
    llm, records = measure(ClosedLoop(2), ["a", BOOM, "b", BOOM, "c"])
    summary = summarize(records)
    assert (summary.num_requests, summary.num_failed, summary.num_answered) == (5, 2, 3)
    assert summary.first_error == "RuntimeError: the step failed"
    assert summary.num_output_tokens == 3 * 4
    assert llm.running == 0


def test_a_refused_request_is_counted_too():
    records = []

    class Refusing(FakeLLM):
        def stream_async(self, prompt, params):
            raise ValueError("too long")

    run_fast(run_load(Refusing(), ClosedLoop(1), ["a"], [SamplingParams()], records))
    assert summarize(records).first_error == "ValueError: too long"


@pytest.mark.parametrize("load", [ClosedLoop(2), PoissonArrivals(10.0)])
def test_cancelling_aborts_what_runs_and_keeps_what_was_answered(load):
    llm, records = FakeLLM(), []

    async def run():
        work = asyncio.ensure_future(
            run_load(llm, load, ["x"] * 6, [SamplingParams()] * 6, records)
        )
        await asyncio.sleep(PREFILL + 3.5 * STEP)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run_fast(run())
    answered = summarize(records).num_requests
    assert 0 < answered < 6
    assert llm.running == 0
    assert llm.aborted == len(records) - answered > 0


def test_levels_as_they_are_typed():
    assert parse_loads(["1,2", "4", "2"], None, 0) == [ClosedLoop(1), ClosedLoop(2), ClosedLoop(4)]
    assert parse_loads(None, ["0.5, 2"], 9) == [PoissonArrivals(0.5, 9), PoissonArrivals(2.0, 9)]
    assert parse_loads(None, None, 0) == [ClosedLoop(1)]


@pytest.mark.parametrize("text", ["0", "-1", "1,,2", "", "1.5", "many"])
def test_bad_concurrency(text):
    with pytest.raises(ValueError, match=r"--concurrency .*: expected whole numbers above 0"):
        parse_loads([text], None, 0)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_bad_request_rate(text):
    with pytest.raises(ValueError, match=r"--request-rate .*: expected numbers above 0"):
        parse_loads(None, [text], 0)
