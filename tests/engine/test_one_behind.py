# SPDX-License-Identifier: Apache-2.0
"""The host one pass behind, as on a GPU, on a CPU: what it knows is stale, what is said is not."""

from __future__ import annotations

import random
import time

import pytest

from dflash.errors import DflashError
from tests.support.engine import greedy_params, make_llm
from tests.support.leaks import live_requests

from .test_many_requests import PARAMS, PROMPTS, SMALL_CACHE, tokens_of

COUNT = 40


@pytest.fixture(autouse=True)
def one_behind(monkeypatch):
    for user in ("build", "graphs"):
        monkeypatch.setattr(f"dflash.engine.{user}.num_steps_ahead", lambda device: 1)


def make(target, draft, **arguments):
    llm = make_llm(target, draft, **({"max_model_len": 128, "max_num_seqs": 16} | arguments))
    assert llm.core._runner.num_steps_ahead == 1
    return llm


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("cache", [{}, SMALL_CACHE | {"num_gpu_blocks_override": 1 + 49}])
@pytest.mark.parametrize("drafted", [True, False], ids=["draft", "no draft"])
def test_together_as_alone(params, cache, drafted, target, draft):
    alone = make(target, None, max_num_seqs=1)
    expected = [
        tokens_of(alone.generate(prompt, param))[0]
        for prompt, param in zip(PROMPTS[:COUNT], PARAMS[params][:COUNT], strict=True)
    ]
    llm = make(target, draft if drafted else None, **cache)
    assert tokens_of(llm.generate(PROMPTS[:COUNT], PARAMS[params][:COUNT])) == expected
    scheduler = llm.core.scheduler
    assert bool(cache) == (scheduler.num_preemptions > 5)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1


def test_logprobs_stay_with_their_tokens(target, draft):
    params = greedy_params(24, logprobs=1)
    outputs = make(target, draft).generate(PROMPTS[:COUNT], params)
    for output in outputs:
        (answer,) = output.outputs
        assert len(answer.logprobs) == len(answer.token_ids) == 24
        assert all(
            listed[token].rank == 1
            for token, listed in zip(answer.token_ids, answer.logprobs, strict=True)
        )


def test_requests_that_leave_while_a_pass_is_in_flight(target, draft):
    """Their rows and blocks go to others at once."""
    choose = random.Random(3)
    expected = tokens_of(make(target, draft).generate(PROMPTS[:COUNT], greedy_params(24)))
    core = make(target, draft, max_num_seqs=4, **SMALL_CACHE).core
    requests = [core.add_request(prompt, greedy_params(24)) for prompt in PROMPTS[:COUNT]]
    in_flight = 0
    while core.scheduler.has_work:
        core.step()
        if choose.random() < 0.2 and core.scheduler.running:
            request = choose.choice(core.scheduler.running)
            in_flight += request.num_in_flight
            core.abort(request)
    kept = [r.finish_reason == "length" for r in requests]
    assert in_flight > 5 and 5 < sum(kept) < COUNT
    for request, tokens, was_kept in zip(requests, expected, kept, strict=True):
        assert request.output_token_ids == tokens[: len(request.output_token_ids)]
        assert not was_kept or len(request.output_token_ids) == 24


def test_tokens_that_were_read_before_a_failure_fail_with_it(target, draft, monkeypatch):
    """The step that read them raises: a request must not go on, or be taken for complete, without them."""
    llm = make(target, draft, max_num_seqs=2)
    core = llm.core
    requests = [core.add_request(PROMPTS[i], greedy_params(n)) for i, n in enumerate((5, 24))]
    seen = {request.request_id: [] for request in requests}
    while len(seen[0]) < 4:
        for new in core.step():
            seen[new.request.request_id] += new.token_ids

    def broken(batch):
        raise RuntimeError("a pass broke off")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broke off"):
        patch.setattr(core._runner, "decode", broken)
        patch.setattr(core.scheduler, "can_grow", lambda: False)  # it reads before it launches
        core.step()
    assert [r.finish_reason for r in requests] == ["error", "error"]
    assert len(requests[0].output_token_ids) == 5 > len(seen[0])  # it was read to its end
    assert not core.scheduler.has_work and not core._flights
    (output,) = llm.generate([PROMPTS[0]], greedy_params(24))
    assert output.outputs[0].finish_reason == "length"


def test_an_idle_engine_holds_nobody_and_idleness_is_no_iteration(target, draft, monkeypatch):
    """A pass is still in flight when the last request leaves."""
    before = live_requests()
    llm = make(target, draft)
    decoded: list[float] = []
    monkeypatch.setattr(llm.core._pacer, "decoded", decoded.append)
    stream = llm.stream(PROMPTS[0], greedy_params(24))
    next(stream)
    stream.close()
    del stream
    assert llm.core._flights
    assert live_requests() == before
    time.sleep(1.0)
    llm.generate([PROMPTS[0]], greedy_params(24))
    assert decoded and max(decoded) < 1.0


def test_an_error_keeps_its_cause(target, draft, monkeypatch):
    llm = make(target, draft)

    def lost(batch):
        raise RuntimeError("CUDA error: unspecified launch failure") from KeyError("why")

    monkeypatch.setattr(llm.core._runner, "decode", lost)
    llm.core.add_request(PROMPTS[0], greedy_params(4))
    with pytest.raises(DflashError) as raised:
        while True:
            llm.core.step()
    assert "unspecified launch failure" in str(raised.value.__cause__)
    assert isinstance(raised.value.__cause__.__cause__, KeyError)
