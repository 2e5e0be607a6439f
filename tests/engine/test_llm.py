# SPDX-License-Identifier: Apache-2.0
"""Several callers of one LLM, failures in a step, and input that is refused before any work is lost."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from dflash import SamplingParams
from tests.support.engine import greedy_params, make_llm

from .conftest import NUM_TOKENS, PROMPTS


@pytest.fixture
def llm(target, draft):
    return make_llm(target, draft, max_num_seqs=2)


def idle(llm):
    """Nothing is left: no request, every row and block is free."""
    scheduler = llm.core.scheduler
    assert not scheduler.has_work and not llm._jobs
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1
    assert len(scheduler._free_rows) == 2
    return True


def test_passes_run_on_the_engines_device(llm, monkeypatch):
    entered = []

    def enter(device):
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr("dflash.engine.core.on_device", enter)
    llm.generate(PROMPTS[:1], greedy_params(2))
    assert entered and set(entered) == {llm.facts.device}


def test_streams_and_batches_interleave(llm, answers):
    first = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
    chunks = [next(first)]
    outputs = llm.generate(PROMPTS, greedy_params(NUM_TOKENS))
    assert [o.outputs[0].token_ids for o in outputs] == answers
    second = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
    other = [next(second)]
    chunks += list(first)
    other += list(second)
    assert (
        [t for c in chunks for t in c.token_ids]
        == answers[0]
        == chunks[-1].finished.outputs[0].token_ids
    )
    assert (
        [t for c in other for t in c.token_ids]
        == answers[1]
        == other[-1].finished.outputs[0].token_ids
    )
    assert idle(llm)


def test_closing_a_stream_frees_its_request(llm):
    stream = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
    next(stream)
    stream.close()
    assert idle(llm)


def test_a_failing_step_ends_its_batch_and_the_next_call_works(llm, answers, monkeypatch):
    speculator = llm.core._step.speculator
    other = llm.stream(PROMPTS[1], greedy_params(NUM_TOKENS))
    next(other)

    def fail(*_, **__):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(speculator, "propose", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate(PROMPTS[0], greedy_params(NUM_TOKENS))
        with pytest.raises(RuntimeError, match=r"out of luck|aborted"):
            list(other)
    assert idle(llm)
    assert llm.generate(PROMPTS[0], greedy_params(NUM_TOKENS))[0].outputs[0].token_ids == answers[0]


@pytest.mark.parametrize(
    "prompt,message",
    [
        ([1.5, 2], "the prompt holds 1.5"),
        (5, "a prompt must be text or a sequence of token ids, got 5"),
        ([], "the prompt has no tokens"),
        ([10**9], "token 1000000000 is outside the vocabulary"),
        ([3] * 2000, "the prompt has 2000 tokens"),
        (b"w3", "a prompt must be text or a sequence of token ids, got b'w3'"),
        ("w3 \ud800", "position 3: surrogates not allowed"),
    ],
)
def test_a_bad_prompt_fails_alone(llm, prompt, message, answers):
    good, bad, last = llm.generate([PROMPTS[0], prompt, PROMPTS[1]], greedy_params(NUM_TOKENS))
    assert [o.outputs[0].token_ids for o in (good, last)] == answers[:2]
    (output,) = bad.outputs
    assert output.finish_reason == "error" and message in str(output.error)
    with pytest.raises(ValueError, match=message):
        list(llm.stream(prompt))
    assert idle(llm)


PROMPT = PROMPTS[0]


@pytest.mark.parametrize(
    "prompts",
    [
        tuple(PROMPT),
        np.array(PROMPT),
        torch.tensor(PROMPT),
        [np.int64(token) for token in PROMPT],
        np.array([PROMPT]),
        [np.array(PROMPT, dtype=np.int32)],
        (torch.tensor(PROMPT),),
    ],
)
def test_token_ids_come_in_many_wraps(prompts, llm, answers):
    (output,) = llm.generate(prompts, greedy_params(8))
    assert output.outputs[0].token_ids == answers[0][:8]
    assert output.prompt_token_ids == PROMPT


@pytest.mark.parametrize("prompts", [None, 5, b"w3", {"prompt_token_ids": [3]}, iter([[3]])])
def test_what_holds_no_prompts_is_refused(prompts, llm):
    with pytest.raises(ValueError, match="prompts: expected text, token ids or a list of these"):
        llm.generate(prompts)
    assert llm.generate([]) == [] and idle(llm)


def test_sampling_params_take_none_numpy_and_iterators():
    params = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)
    assert params == SamplingParams()
    stops = [5]
    params = SamplingParams(stop=iter(["a"]), stop_token_ids=stops)
    stops.append(6)
    assert params == SamplingParams(stop=["a"], stop_token_ids=(5,))


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_a_seed_may_be_numpys(kind, llm):
    runs = [
        llm.generate([PROMPT], SamplingParams(seed=seed, n=2, max_tokens=8))[0].outputs
        for seed in (7, kind(7))
    ]
    assert [o.token_ids for o in runs[0]] == [o.token_ids for o in runs[1]]


@pytest.mark.parametrize(
    "prompts,params,message",
    [
        ([[3]], {"max_tokens": 3}, "expected SamplingParams"),
        ([[3], [4]], [SamplingParams()], "1 sampling_params for 2 prompts"),
    ],
)
def test_sampling_params_that_do_not_fit_are_refused(llm, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert idle(llm)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"max_tokens": 2.5}, "max_tokens: expected integers, got 2.5"),
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids must be token ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids: expected integers"),
        ({"seed": 1.5}, "seed: expected integers"),
        ({"seed": 2**63}, "seed must fit in 64 bits"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": 1e-38}, "temperature must be 0"),
        ({"stop": ["a", ""]}, "stop must be non-empty strings"),
        ({"stop": 3}, "stop: expected a sequence, got 3"),
        ({"stop_token_ids": 3}, "stop_token_ids: expected a sequence, got 3"),
        ({"logit_bias": [1, 2]}, "logit_bias: expected a mapping"),
        ({"prompt_logprobs": 0}, "prompt_logprobs is not supported"),
        ({"n": 0}, "n must be >= 1"),
        ({"min_tokens": 17}, r"min_tokens must be in 0..max_tokens \(16\), got 17"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": "all"}, "top_p: expected a number"),
        ({"top_k": -2}, "top_k must be >= 1, or 0 or -1"),
        ({"top_k": 1.5}, "top_k: expected integers"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0"),
        ({"presence_penalty": 3}, r"presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty: expected a number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: expected integers"),
        ({"logit_bias": {3: "b"}}, "logit_bias: expected numbers"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1025 entries"),
        ({"logprobs": 21}, r"logprobs must be in 0..20"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported: only generated tokens"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs is not supported"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
    ],
)
def test_sampling_params_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**arguments)


def test_without_draft_shares_the_target(llm, answers):
    plain = llm.without_draft()
    assert plain.core._step.target.lm_head.data_ptr() == llm.core._step.target.lm_head.data_ptr()
    (output,) = plain.generate(PROMPTS[2], greedy_params(NUM_TOKENS))
    assert output.outputs[0].token_ids == answers[2] and output.statistics.num_drafts == 0
    assert llm.generate(PROMPTS[2], greedy_params(NUM_TOKENS))[0].outputs[0].token_ids == answers[2]


def test_a_long_prompt_alternates_with_running_requests(target, draft, answers):
    llm = make_llm(target, draft, max_num_seqs=2, max_num_batched_tokens=4)
    stream = llm.stream(PROMPTS[0], greedy_params(NUM_TOKENS))
    tokens = list(next(stream).token_ids)
    other = llm.stream(PROMPTS[3], greedy_params(NUM_TOKENS))
    assert next(other).token_ids[0] == answers[3][0]
    (job, _) = llm._jobs._job_of.values()
    waiting = [t for chunk in job.chunks for t in chunk.token_ids]
    assert waiting  # the first request went on between the chunks of the second's prompt
    assert tokens + waiting == answers[0][: len(tokens + waiting)]
    other.close()
    stream.close()
