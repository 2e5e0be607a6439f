# SPDX-License-Identifier: Apache-2.0
"""Iterations as CUDA graphs: the same bits as the same padded batch run eagerly, whoever joins and leaves."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from dflash import LLM, SamplingParams
from dflash.speculators import buffers as speculator_buffers

pytestmark = pytest.mark.gpu

QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain what a hash table is.",
    "A train drives 60 km in 45 minutes. How fast is it?",
    "Complete this Python function: def is_prime(n):",
    "List the planets of the solar system.",
]


def make_llm(**arguments) -> LLM:
    gc.collect()  # an engine that went out of sight is a cycle: it still holds its cache
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 30,
    }
    return LLM("demo", "demo", **(defaults | arguments))


def requests(llm: LLM, count: int, mixed: bool) -> tuple[list[str], list[SamplingParams]]:
    choose = random.Random(0)
    prompts, params = [], []
    for i in range(count):
        question = QUESTIONS[i % len(QUESTIONS)]
        prompts.append(llm.chat_prompt([{"role": "user", "content": question}]))
        sampled = mixed and i % 3 != 0
        params.append(
            SamplingParams(
                temperature=0.8 if sampled else 0.0,
                top_p=0.95 if sampled else 1.0,
                top_k=20 if sampled else 0,
                presence_penalty=0.5 if mixed and i % 4 == 0 else 0.0,
                seed=i,
                max_tokens=choose.randint(1, 400),
                ignore_eos=True,
                logprobs=2 if mixed and i % 7 == 0 else None,
            )
        )
    return prompts, params


def answers(llm: LLM, count: int, mixed: bool):
    outputs = llm.generate(*requests(llm, count, mixed))
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("mixed", [False, True], ids=["greedy", "mixed"])
def test_graphs_equal_eager_bit_for_bit(mixed):
    """Also every byte of both K/V caches, after more than a thousand iterations."""
    results, caches, steps = [], [], []
    for enforce_eager in (False, True):
        llm = make_llm(enforce_eager=enforce_eager, enable_prefix_caching=False)
        assert bool(llm.core._runner.captured) != enforce_eager
        warmed_up = llm.core._num_passes
        results.append(answers(llm, 48, mixed))
        steps.append(llm.core._num_passes - warmed_up)
        step = llm.core._step
        decoders = (step.target.decoder, step.speculator.drafter.decoder)
        caches.append([c.key.view(torch.uint8).cpu() for d in decoders for c in d.caches])
    assert results[0] == results[1]
    assert steps[0] == steps[1] > 700
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours[1:], theirs[1:])  # the null block is never written


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("max_num_seqs", [4, 32])
def test_tokens_of_the_head_are_those_of_its_logits(temperature, max_num_seqs, monkeypatch):
    """Drafts and verified rows, in graphs; beside the same engine that leaves logits, eagerly.

    32 requests of 8 rows are two blocks of 128, whose logits have the head's bits in a strict engine.
    """
    count = 3 * max_num_seqs // 2 + 6
    prompts = [[3 + i, 40, 500, 6000] for i in range(count)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=60 + i, ignore_eos=True)
        for i in range(count)
    ]
    arguments = {"max_num_seqs": max_num_seqs, "strict": max_num_seqs == 32}
    llm = make_llm(**arguments)
    target = llm.core._step.target
    assert target.samples_in_head(128) and target.samples_in_head(8 * max_num_seqs)
    assert llm.core._runner.captured[max_num_seqs, False].flow.raw_logits is None

    def tokens_and_accepted(engine):
        outputs = engine.generate(prompts, params)
        return [(o.outputs[0].token_ids, o.statistics.num_accepted_tokens) for o in outputs]

    sampled = tokens_and_accepted(llm)
    assert sum(accepted for _, accepted in sampled) > 100
    monkeypatch.setattr(speculator_buffers, "lm_head_sample_plan", lambda *operands: None)
    other = make_llm(enforce_eager=True, **arguments)
    monkeypatch.setattr(other.core._step.target, "samples_in_head", lambda num_rows: False)
    assert tokens_and_accepted(other) == sampled


def test_float32_is_lossless_through_graphs():
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = make_llm(dtype="float32")
    with_draft = answers(llm, 10, False)
    plain = llm.without_draft()
    assert plain.core._runner.captured
    assert [tokens for tokens, _ in answers(plain, 10, False)] == [t for t, _ in with_draft]


def test_seeded_samples_do_not_depend_on_neighbours():
    llm = make_llm(dtype="float32")
    prompts, params = requests(llm, 8, True)
    together = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], param)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_a_small_cache_preempts_and_keeps_the_answers():
    expected = answers(make_llm(dtype="float32"), 12, False)
    small = make_llm(dtype="float32", num_gpu_blocks_override=50, enable_prefix_caching=False)
    assert answers(small, 12, False) == expected
    assert small.core.scheduler.num_preemptions > 3


def test_graphs_share_the_memory_of_the_largest():
    """Eleven buckets, twice, and six of prompts: were each to keep its logits, they would take several times what was
    planned.
    """
    llm = make_llm(max_num_seqs=64)
    assert len(llm.core._runner.captured) == 22
    assert len(llm.core._runner.captured_prompts) == 6
    assert 0 < llm.core._runner.num_bytes <= llm.facts.memory.graphs


def test_no_memory_for_a_large_graph_leaves_the_small_ones(monkeypatch, caplog):
    from dflash.engine.buckets import PromptBucket
    from dflash.engine.graphs import GraphRunner

    capture = GraphRunner._capture_one

    def capture_small(self, bucket, *arguments):
        rows = bucket.num_rows / 128 if isinstance(bucket, PromptBucket) else bucket
        if rows > 2:
            raise torch.cuda.OutOfMemoryError("no memory")
        return capture(self, bucket, *arguments)

    expected = answers(make_llm(), 10, False)
    monkeypatch.setattr(GraphRunner, "_capture_one", capture_small)
    llm = make_llm()
    assert {bucket for bucket, _ in llm.core._runner.captured} == {1, 2}
    assert {bucket.num_rows for bucket in llm.core._runner.captured_prompts} == {128, 256}
    assert "no memory for the CUDA graph of 4 requests" in caplog.text
    assert "no memory for the CUDA graph of 512 prompt tokens of 4 requests" in caplog.text
    assert answers(llm, 10, False) == expected


def test_a_small_model_drafts_inside_the_graph():
    """The demo target for itself: N passes of it are captured, say what eager ones say, and are nearly always right."""
    results, caches = [], []
    arguments = {"draft_method": "autoregressive", "num_speculative_tokens": 3}
    for enforce_eager in (False, True):
        llm = make_llm(enforce_eager=enforce_eager, enable_prefix_caching=False, **arguments)
        assert bool(llm.core._runner.captured) != enforce_eager
        results.append(answers(llm, 24, True))
        step = llm.core._step
        decoders = (step.target.decoder, step.speculator.drafter.decoder)
        caches.append([c.key.view(torch.uint8).cpu() for d in decoders for c in d.caches])
    assert results[0] == results[1]
    for ours, theirs in zip(*caches, strict=True):
        assert torch.equal(ours[1:], theirs[1:])
    llm = make_llm(**arguments)
    # Rows alone and rows of a block are rounded otherwise, and a request's last block is cut.
    answers(llm, 10, False)
    print(f"demo drafting for itself, bf16: AL {llm.statistics.acceptance_length:.3f}")
    assert 3.7 < llm.statistics.acceptance_length <= 4.0


def test_float32_is_lossless_with_a_small_model_in_the_graph():
    torch.backends.cuda.matmul.allow_tf32 = False
    llm = make_llm(dtype="float32", draft_method="autoregressive")
    with_draft = answers(llm, 10, False)
    assert [t for t, _ in answers(llm.without_draft(), 10, False)] == [t for t, _ in with_draft]
