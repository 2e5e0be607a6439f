# SPDX-License-Identifier: Apache-2.0
"""Passes over prompts as CUDA graphs: what they say is what prompts say that nothing pads and nothing captures."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dflash import LLM, RequestOutput, SamplingParams

from .test_graphs import make_llm

pytestmark = pytest.mark.gpu

LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700)
TEXT = " ".join(f"Question {i}: what is {i} times {i + 7}? It is {i * (i + 7)}." for i in range(80))


@pytest.fixture(autouse=True)
def no_tf32():
    torch.backends.cuda.matmul.allow_tf32 = False


def prompts_of(llm: LLM, lengths=LENGTHS, shared: bool = False) -> list[list[int]]:
    """Of a text, from another place each unless they share their beginning."""
    ids = llm.tokenizer.encode(TEXT)
    starts = [0 if shared else 5 * i for i in range(len(lengths))]
    assert len(ids) > max(lengths) + max(starts)
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def params(count: int, temperature: float = 0.0) -> list[SamplingParams]:
    """That end at different times: one joins while others run."""
    return [
        SamplingParams(temperature=temperature, seed=i, max_tokens=8 + i * 13 % 40, ignore_eos=True)
        for i in range(count)
    ]


def uncaptured(**arguments) -> LLM:
    """Nothing is captured, and prompts are as long as they are."""
    llm = make_llm(enforce_eager=True, **arguments)
    assert llm.core._runner.prompt_buckets and not llm.core._runner.captured_prompts
    llm.core._runner.prompt_buckets.clear()
    return llm


def count_replays(llm: LLM) -> Counter[tuple[int, int]]:
    """Filled while it generates: rows and requests of the prompt graphs that are replayed."""
    replays: Counter[tuple[int, int]] = Counter()
    runner, replay = llm.core._runner, llm.core._runner._replay

    def counted(captured, batch):
        if batch.logits_rows is not None:
            replays[batch.num_rows, batch.num_reqs] += 1
        return replay(captured, batch)

    runner._replay = counted
    return replays


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_what_is_captured():
    llm = make_llm(max_num_seqs=8)
    captured = llm.core._runner.captured_prompts
    sizes = {(bucket.num_rows, bucket.num_reqs) for bucket in captured}
    assert sizes == {(n, r) for n in (128, 256, 512) for r in (1, 8)}


@pytest.mark.parametrize("draft_method", ["dflash", "autoregressive"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_by_one_and_together(temperature, draft_method):
    arguments = {"dtype": "float32", "enable_prefix_caching": False, "draft_method": draft_method}
    llm = make_llm(**arguments)
    prompts, given = prompts_of(llm), params(len(LENGTHS), temperature)
    replays = count_replays(llm)
    alone = [tokens_of(llm.generate([p], q))[0] for p, q in zip(prompts, given, strict=True)]
    assert replays == {(128, 1): 4, (256, 1): 3, (512, 1): 3}
    replays.clear()
    together = tokens_of(llm.generate(prompts, given))
    assert replays.total() >= 3
    del llm
    expected = tokens_of(uncaptured(**arguments).generate(prompts, given))
    assert alone == expected
    assert together == expected


def test_several_join_at_once():
    """With one token each, four a pass and three at the end, which fill a part of their bucket."""
    arguments = {"dtype": "float32", "enable_prefix_caching": False}
    lengths = [3 + i * 17 % 90 for i in range(19)]
    llm, eager = make_llm(**arguments), uncaptured(**arguments)
    prompts = prompts_of(llm, lengths)
    replays = count_replays(llm)
    for max_tokens in (1, 30):
        same = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        answers = tokens_of(llm.generate(prompts, same))
        assert answers == tokens_of(eager.generate(prompts, same))
        if max_tokens == 1:
            assert {num_reqs for _, num_reqs in replays} == {4} and replays.total() == 5


def test_beginnings_from_the_prefix_cache():
    llm = make_llm(dtype="float32", enable_prefix_caching=True)
    lengths = (700, 300, 310, 400, 512, 513, 640, 699, 701)
    prompts, given = prompts_of(llm, lengths, shared=True), params(len(lengths))
    llm.generate(prompts[:1], given[0])
    replays = count_replays(llm)
    answers = tokens_of(llm.generate(prompts, given))
    assert llm.statistics.num_cached_tokens > 2000
    assert replays.total() >= 3
    del llm
    eager = uncaptured(dtype="float32", enable_prefix_caching=False)
    assert answers == tokens_of(eager.generate(prompts, given))


def test_a_resumed_request():
    """Its pass samples nothing; beside others that do."""
    lengths = [40 + 29 * i % 160 for i in range(12)]
    arguments = {"dtype": "float32", "enable_prefix_caching": False}
    llm = make_llm(num_gpu_blocks_override=56, **arguments)
    prompts = prompts_of(llm, lengths)
    given = [SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)] * len(lengths)
    replays = count_replays(llm)
    answers = tokens_of(llm.generate(prompts, given))
    assert llm.core.scheduler.num_preemptions > 2
    assert replays.total() > len(lengths) / 4
    del llm
    assert answers == tokens_of(uncaptured(**arguments).generate(prompts, given))


@pytest.mark.parametrize("strict", [False, True])
def test_graphs_equal_eager_bit_for_bit(strict):
    """bfloat16 in the same buckets: tokens, logprobs and every byte of both K/V caches."""
    results, caches = [], []
    for enforce_eager in (False, True):
        llm = make_llm(enforce_eager=enforce_eager, enable_prefix_caching=False, strict=strict)
        prompts, given = prompts_of(llm), params(len(LENGTHS), 0.8)
        replays = count_replays(llm)
        outputs = llm.generate(prompts, given)
        assert (replays.total() >= 3) != enforce_eager
        with_logprobs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
        )
        results.append((tokens_of(outputs), [o.outputs[0].logprobs for o in with_logprobs]))
        step = llm.core._step
        decoders = (step.target.decoder, step.speculator.drafter.decoder)
        caches.append([c.key.view(torch.uint8).cpu() for d in decoders for c in d.caches])
    assert results[0] == results[1]
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours[1:], theirs[1:])  # the null block is never written


def test_strict_answers_do_not_depend_on_padding():
    """bfloat16: nothing padded but to tiles, one request at a time."""
    arguments = {"strict": True, "enable_prefix_caching": False}
    llm = make_llm(**arguments)
    prompts, given = prompts_of(llm), params(len(LENGTHS))
    answers = tokens_of(llm.generate(prompts, given))
    del llm
    eager = uncaptured(max_num_seqs=1, **arguments)
    assert answers == tokens_of(eager.generate(prompts, given))


def launches(llm: LLM, prompt: list[int]) -> list[str]:
    """What the host launches and copies in one pass over a prompt whose batch is on the device."""
    runner, prefill = llm.core._runner, llm.core._runner.prefill
    names: list[str] = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]

    def profiled(batch):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            flow = prefill(batch)
            torch.cuda.synchronize()
        events = [event.name for event in profiler.events()]
        names.extend(n for n in events if n.startswith(("cuda", "cu")))
        return flow

    runner.prefill = profiled
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4))
    runner.prefill = prefill
    return [n for n in names if "Launch" in n or "Memcpy" in n or "Memset" in n]


def test_a_prefill_is_one_launch():
    prompt = list(range(100, 230))
    llm = make_llm(enable_prefix_caching=False)
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4))
    assert launches(llm, prompt) == ["cudaGraphLaunch"]
    del llm
    eager = launches(uncaptured(enable_prefix_caching=False), prompt)
    assert len(eager) > 100 and "cudaGraphLaunch" not in eager
