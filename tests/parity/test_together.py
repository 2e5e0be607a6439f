# SPDX-License-Identifier: Apache-2.0
"""100 HumanEval requests on the demo pair say the same alone and together, whatever the scheduler does to them.

Half an hour on two cores: `make long`. tests/engine/test_many_requests.py does the same with a tiny pair.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from dflash.engine.llm import LLM
from tests.support import humaneval
from tests.support.engine import greedy_params

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

NUM_REQUESTS = 100
NUM_TOKENS = 144  # a request grows by most of a prompt: the small cache preempts every other one
PARAMS = greedy_params(NUM_TOKENS)
ENGINES = {
    "all at once": {"max_num_seqs": NUM_REQUESTS},
    "chunks of 16": {"max_num_seqs": NUM_REQUESTS, "max_num_batched_tokens": 16},
    "prefix cache": {"max_num_seqs": 16, "enable_prefix_caching": True},
    "preemption": {"max_num_seqs": 64, "num_gpu_blocks_override": 1 + 300, "kv_block_size": 4},
}


def make_llm(**arguments) -> LLM:
    defaults = {"max_model_len": 512, "enable_prefix_caching": False, "num_speculative_tokens": 7}
    return LLM("demo", "demo", device="cpu", dtype="float32", **(defaults | arguments))


@pytest.fixture(scope="module", autouse=True)
def _two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = make_llm(max_num_seqs=1).tokenizer
    questions = humaneval.questions(NUM_REQUESTS)
    return [humaneval.chat_token_ids(tokenizer, question) for question in questions]


@pytest.fixture(scope="module")
def alone(prompts) -> list[list[int]]:
    llm = make_llm(max_num_seqs=1)
    return [llm.generate([prompt], PARAMS)[0].outputs[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("name", ENGINES)
def test_together_as_alone(name, prompts, alone):
    llm = make_llm(**ENGINES[name])
    outputs = llm.generate(prompts, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    if name == "preemption":
        assert llm.core.scheduler.num_preemptions >= 50
    if name == "prefix cache":
        # The template and the question's first line are common to all.
        assert llm.statistics.num_cached_tokens >= 16 * (NUM_REQUESTS - 16)


def test_twenty_aborted_change_nothing_for_the_others(prompts, alone):
    llm = make_llm(max_num_seqs=32)
    choose = random.Random(0)
    closed = {i: choose.randint(1, 6) for i in choose.sample(range(NUM_REQUESTS), 20)}

    async def client(i: int) -> list[int]:
        tokens: list[int] = []
        stream = llm.stream_async(prompts[i], PARAMS)
        async for chunk in stream:
            tokens += chunk.token_ids
            if len(tokens) >= closed.get(i, NUM_TOKENS + 1):
                break
        await stream.aclose()
        return tokens

    async def run() -> list[list[int]]:
        return await asyncio.gather(*(client(i) for i in range(NUM_REQUESTS)))

    answers = asyncio.run(run())
    assert all(tokens == alone[i][: len(tokens)] for i, tokens in enumerate(answers))
    assert all(len(answers[i]) == len(alone[i]) for i in range(NUM_REQUESTS) if i not in closed)
    pool = llm.core.scheduler.pool
    assert pool.num_free == pool.num_blocks - 1 and not llm.core.scheduler.has_work
