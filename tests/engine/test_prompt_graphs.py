# SPDX-License-Identifier: Apache-2.0
"""Passes over prompts from graphs, recorded on a CPU: answers and acceptance are those of passes as they come."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dflash.engine import buckets
from dflash.engine.request import PrefillChunk, Request
from tests.support import engine, recorded

from .test_many_requests import ENGINES, NUM_TOKENS, PROMPTS, SMALL_CACHE, make_llm, tokens_of
from .test_many_requests import PARAMS as SAME_LENGTH

COUNT = 40
# They end at different times, so that others join one by one.
PARAMS = {
    name: [replace(p, max_tokens=NUM_TOKENS + i * 7 % 11) for i, p in enumerate(params[:COUNT])]
    for name, params in SAME_LENGTH.items()
}
MORE_ENGINES = {
    "16 rows": {"max_num_seqs": 16},
    "one": {"max_num_seqs": 1},
    "a small budget": {"max_num_seqs": 16, "max_num_batched_tokens": 48},
}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Prompts are of 3 to 60 tokens."""
    monkeypatch.setattr(buckets, "PROMPT_ROWS", (8, 16, 40, 80))
    monkeypatch.setattr(buckets, "PROMPT_REQS", (1, 3))


@pytest.fixture(scope="module")
def alone(target, draft):
    llm = make_llm(target, None, max_num_seqs=1)
    return {
        name: [
            tokens_of(llm.generate(prompt, param))[0]
            for prompt, param in zip(PROMPTS[:COUNT], params, strict=True)
        ]
        for name, params in PARAMS.items()
    }


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", [name for name in ENGINES | MORE_ENGINES if name != "all at once"])
def test_together_as_alone(name, params, target, draft, alone, monkeypatch):
    """Prefix hits, resumed requests, tiles, chunks of which the last alone is replayed."""
    arguments = (ENGINES | MORE_ENGINES)[name]
    accepted = []
    for captures in (False, True):
        llm = make_llm(target, draft, **arguments)
        if captures:
            recorded.capture(llm, monkeypatch)
        assert tokens_of(llm.generate(PROMPTS[:COUNT], PARAMS[params])) == alone[params]
        accepted.append(llm.statistics.num_accepted_tokens_per_pos)
    iterations, prompts = recorded.replays(llm)
    assert iterations == llm.core.num_iterations
    assert prompts >= 5
    assert accepted[0] == accepted[1]
    if "preemption" in name:
        assert llm.core.scheduler.num_preemptions > 5
    if "prefix cache" in name:
        assert llm.statistics.num_cached_tokens > 100


def test_one_token_and_a_full_bucket(target, draft, monkeypatch):
    """At 1, at a bucket and beside one; each alone, one replay each, until none is large enough."""
    choose = random.Random(2)
    llm, eager = make_llm(target, draft), make_llm(target, draft)
    recorded.capture(llm, monkeypatch)
    before = 0
    for length in (1, 7, 8, 9, 16, 17, 79, 80, 81):
        prompt = [choose.randrange(3, 32) for _ in range(length)]
        params = engine.greedy_params(12)
        assert tokens_of(llm.generate(prompt, params)) == tokens_of(eager.generate(prompt, params))
        _, prompts = recorded.replays(llm)
        assert prompts - before == (length <= 80)
        before = prompts


def test_a_prefill_is_one_graph(target, draft, monkeypatch):
    """Beside the part that only runs for logprobs."""
    llm = make_llm(target, draft)
    recorded.capture(llm, monkeypatch)
    captured = llm.core._runner.captured_prompts
    assert len(captured) == 4 * 2
    for bucket, step in captured.items():
        graph, logprobs = step.segments
        assert isinstance(graph, recorded.RecordedGraph) and logprobs.name == "logprobs"
        assert (step.flow.batch.num_rows, step.flow.batch.num_reqs) == (
            bucket.num_rows,
            bucket.num_reqs,
        )


def test_the_middle_of_a_prompt_is_not_replayed(target, draft, monkeypatch):
    """Although its chunks have the size of a bucket."""
    llm = make_llm(target, draft, max_num_batched_tokens=16)
    recorded.capture(llm, monkeypatch)
    prompt = [3 + i % 29 for i in range(48 + 5)]
    params = engine.greedy_params(12)
    expected = tokens_of(make_llm(target, draft).generate(prompt, params))
    assert tokens_of(llm.generate(prompt, params)) == expected
    assert recorded.replays(llm)[1] == 1
    request = Request(0, prompt, params, 12, 0)
    middle, end = PrefillChunk(request, 0, 5), PrefillChunk(request, 48, 5)
    assert llm.core._runner.prompt_bucket([middle]) is None
    assert llm.core._runner.prompt_bucket([end]) == buckets.PromptBucket(8, 1)


def test_logprobs_stay_with_their_tokens(target, draft, monkeypatch):
    params = engine.greedy_params(12, logprobs=2)
    arguments = {"max_num_seqs": 16, **SMALL_CACHE}  # some of a batch are resumed
    llm, eager = (make_llm(target, draft, **arguments) for _ in range(2))
    recorded.capture(llm, monkeypatch)
    outputs = [e.generate(PROMPTS[:COUNT], params) for e in (llm, eager)]
    assert llm.core.scheduler.num_preemptions > 5 and recorded.replays(llm)[1] > 5
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for a, b in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=1e-4) for t in a)
            assert all(a[t].rank == b[t].rank for t in a)


def test_padding_is_stored_nowhere(target, draft, monkeypatch):
    """Not in block 0, and not behind the prompt."""
    llm = make_llm(target, draft, kv_block_size=4)
    recorded.capture(llm, monkeypatch)
    step = llm.core._step
    decoders = (step.target.decoder, step.speculator.drafter.decoder)
    tensors = [t for d in decoders for cache in d.caches for t in (cache.key, cache.value)]
    for tensor in tensors:
        tensor.fill_(123.0)
    llm.generate([PROMPTS[3][:3]], engine.greedy_params(1))
    assert recorded.replays(llm) == (0, 1)
    verified, drafted = tensors[0].flatten(0, 1), tensors[-1].flatten(0, 1)
    assert (verified != 123.0).flatten(1).any(1).sum() == 3
    assert (drafted != 123.0).flatten(1).any(1).sum() == 3 + 4  # and the block that is proposed
    assert all((tensor[0] == 123.0).all() for tensor in tensors)


@pytest.mark.parametrize("params", PARAMS)
def test_a_small_model_drafts(params, target, alone, monkeypatch):
    """It reads the prompts, too."""
    llm = make_llm(target, target, draft_method="autoregressive", num_speculative_tokens=3)
    recorded.capture(llm, monkeypatch)
    assert tokens_of(llm.generate(PROMPTS[:COUNT], PARAMS[params])) == alone[params]
    assert recorded.replays(llm)[1] > 5
    if params == "greedy":
        assert llm.statistics.acceptance_length > 3.5


def test_a_recorded_graph_takes_nothing_from_the_host():
    """What the tests above lean on."""
    table = torch.zeros(4)
    graph = recorded.RecordedGraph()
    with recorded.record(graph):
        doubled = table * 2
    table.fill_(3.0)
    graph.replay()
    assert doubled.tolist() == [6.0] * 4
    for read in (lambda: table[0].item(), lambda: table.copy_(torch.tensor([1.0] * 4))):
        with pytest.raises(AssertionError, match="under capture"), recorded.record(graph):
            read()
