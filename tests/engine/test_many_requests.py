# SPDX-License-Identifier: Apache-2.0
"""A hundred requests say the same alone and together, whatever becomes of their K/V in between."""

from __future__ import annotations

import asyncio
import random

import pytest

from dflash.engine.sampling_params import SamplingParams
from tests.support import engine

NUM_REQUESTS = 100
NUM_TOKENS = 24


def make_prompts() -> list[list[int]]:
    """Of 3 to 60 tokens, half of them with one of two common beginnings of 30."""
    choose = random.Random(5)
    words = lambda count: [choose.randrange(3, 32) for _ in range(count)]  # noqa: E731
    common = [words(30), words(30)]
    prompts = []
    for i in range(NUM_REQUESTS):
        tail = words(choose.randint(3, 30))
        prompts.append(common[i % 4] + tail if i % 4 < 2 else tail)
    return prompts


PROMPTS = make_prompts()
GREEDY = [engine.greedy_params(NUM_TOKENS)] * NUM_REQUESTS
SAMPLED = [
    SamplingParams(
        temperature=0.3 + i % 7 / 5,
        top_p=(1.0, 0.9)[i % 2],
        top_k=(0, 5, 12)[i % 3],
        min_p=(0.0, 0.02)[i % 2],
        repetition_penalty=(1.0, 1.1)[i % 5 == 0],
        frequency_penalty=(0.0, 0.4)[i % 4 == 0],
        presence_penalty=(0.0, 0.3)[i % 3 == 0],
        logit_bias={3: 2.0, 4: -50.0} if i % 6 == 0 else {},
        min_tokens=NUM_TOKENS if i % 8 == 0 else 0,
        stop_token_ids=[5] if i % 2 else [],
        seed=i,
        max_tokens=NUM_TOKENS,
    )
    for i in range(NUM_REQUESTS)
]
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED}

SMALL_CACHE = {"num_gpu_blocks_override": 1 + 46, "kv_block_size": 4}
ENGINES = {
    "all at once": {"max_num_seqs": NUM_REQUESTS},
    "chunks of 16": {"max_num_seqs": 16, "max_num_batched_tokens": 16},
    "strict": {"max_num_seqs": 16, "max_num_batched_tokens": 100, "strict": True},
    "prefix cache": {"max_num_seqs": 8, "enable_prefix_caching": True},
    "preemption": {"max_num_seqs": 16, **SMALL_CACHE},
    "preemption, prefix cache": {
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        **SMALL_CACHE,
    },
}


def make_llm(target, draft, **arguments):
    defaults = {"max_model_len": 128, "enable_prefix_caching": False}
    return engine.make_llm(target, draft, **(defaults | arguments))


def tokens_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(target, draft) -> dict[str, list[list[int]]]:
    """Every answer from an engine that serves one request at a time, without a drafter."""
    llm = make_llm(target, None, max_num_seqs=1)
    return {
        name: [
            tokens_of(llm.generate(prompt, param))[0]
            for prompt, param in zip(PROMPTS, params, strict=True)
        ]
        for name, params in PARAMS.items()
    }


@pytest.mark.parametrize("drafted", [True, False], ids=["draft", "no draft"])
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", ENGINES)
def test_together_as_alone(name, params, drafted, target, draft, alone):
    llm = make_llm(target, draft if drafted else None, **ENGINES[name])
    outputs = llm.generate(PROMPTS, PARAMS[params])
    assert tokens_of(outputs) == alone[params]
    scheduler = llm.core.scheduler
    if "preemption" in name:
        assert scheduler.num_preemptions >= (50 if params == "greedy" else 30)
        assert llm.statistics.num_preemptions == scheduler.num_preemptions
    if "prefix cache" in name:
        hits = sum(output.usage.cached_tokens for output in outputs)
        assert hits == llm.statistics.num_cached_tokens > 200
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1


@pytest.mark.parametrize("method", ["standard", "block"])
def test_recorded_drafts_repeat_under_preemption(method, target, draft):
    """A resumed request drafts again behind the same bonus: acceptance goes the same way."""
    runs = []
    for arguments in ({"max_num_seqs": 1}, {"max_num_seqs": 16, **SMALL_CACHE}):
        llm = make_llm(
            target,
            draft,
            draft_sample_method="gumbel",
            rejection_sample_method=method,
            **arguments,
        )
        runs.append(tokens_of(llm.generate(PROMPTS[:40], SAMPLED[:40])))
    assert llm.core.scheduler.num_preemptions >= 10
    assert runs[0] == runs[1]


def test_preemption_and_prefix_hits_keep_the_drafts(target, draft):
    """Trap 14: acceptance is what it is without them."""
    lengths = []
    for arguments in ({"max_num_seqs": 16}, {"enable_prefix_caching": True, **SMALL_CACHE}):
        llm = make_llm(target, draft, **arguments)
        llm.generate(PROMPTS, GREEDY)
        lengths.append(llm.statistics.num_accepted_tokens_per_pos)
    assert llm.statistics.num_preemptions > 10 and llm.statistics.num_cached_tokens > 100
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name", ["all at once", "preemption, prefix cache"])
def test_aborting_some_changes_nothing_for_the_others(name, target, draft, alone):
    """20 of 100 concurrent streams are closed after a random number of chunks."""
    llm = make_llm(target, draft, **ENGINES[name])
    choose = random.Random(1)
    closed = {i: choose.randint(0, 5) for i in choose.sample(range(NUM_REQUESTS), 20)}

    async def client(i: int) -> list[int]:
        tokens: list[int] = []
        stream = llm.stream_async(PROMPTS[i], GREEDY[i])
        chunks = 0
        async for chunk in stream:
            tokens += chunk.token_ids
            chunks += 1
            if chunks > closed.get(i, 100):
                break
        await stream.aclose()
        return tokens

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(client(i) for i in range(NUM_REQUESTS)))

    for i, tokens in enumerate(asyncio.run(run())):
        expected = alone["greedy"][i]
        if i in closed:
            assert len(tokens) > 0 and tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    pool = llm.core.scheduler.pool
    assert pool.num_free == pool.num_blocks - 1 and not llm.core.scheduler.has_work
