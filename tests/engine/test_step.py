# SPDX-License-Identifier: Apache-2.0
"""The step on tiny checkpoints, with an oracle that decides how many drafts of a block are right."""

from __future__ import annotations

import random

import pytest
import torch

from tests.engine.conftest import NUM_TOKENS, PROMPTS
from tests.support import engine
from tests.support.runner import PairRunner

VOCAB_SIZE = 32


def oracle(answers, prompts, num_right):
    """Drafts that follow the answer for num_right() tokens, are wrong once, and then are right again."""

    def drafts(request_id: int, position: int, count: int) -> list[int]:
        start = position - len(prompts[request_id])
        tokens = [
            answers[request_id][i] if i < NUM_TOKENS else 0 for i in range(start, start + count)
        ]
        wrong = num_right(count)
        if wrong < count:
            tokens[wrong] = (tokens[wrong] + 1) % VOCAB_SIZE
        return tokens

    return drafts


def generate(llm, recorder_oracle, prompts=PROMPTS, max_tokens=NUM_TOKENS):
    recorder = engine.Recorder(llm, recorder_oracle)
    outputs = llm.generate(prompts, engine.greedy_params(max_tokens))
    return outputs, recorder.proposals


def proposals_from_scratch(runner, prompt, answer, proposals):
    """What the drafter says behind the same tokens when nothing was ever rejected or paged."""
    tokens = prompt + answer
    result = []
    for proposal in proposals:
        _, taps = runner.verify(tokens[: proposal.position])
        runner.observe(taps)
        hidden = runner.draft(proposal.bonus, proposal.position, len(proposal.proposed))
        result.append(runner.drafter.logits(hidden[1:]).argmax(-1).tolist())
    return result


@pytest.mark.parametrize("kv_block_size", [1, 3, 16])
@pytest.mark.parametrize("accepted", ["all", "none", "some"])
def test_pages_and_rejections_change_nothing(kv_block_size, accepted, target, draft, answers):
    """Output and proposals, with blocks that end before, at and behind the edge of a page."""
    choose = random.Random(0)
    num_right = {
        "all": lambda count: count,
        "none": lambda count: 0,
        "some": lambda count: choose.randint(0, count),
    }[accepted]
    llm = engine.make_llm(target, draft, kv_block_size=kv_block_size, max_model_len=128)
    outputs, proposals = generate(llm, oracle(answers, PROMPTS, num_right))
    assert [output.outputs[0].token_ids for output in outputs] == answers
    runner = PairRunner(target, draft, kv_block_size=64)
    for request_id, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        own = [p for p in proposals if p.request_id == request_id]
        expected = proposals_from_scratch(runner, prompt, answer, own)
        assert [p.proposed for p in own] == expected
    drafted = outputs[0].statistics
    if accepted == "all":
        assert drafted.num_steps == -(-(NUM_TOKENS - 1) // 4)
    if accepted == "none":
        assert drafted.num_steps == NUM_TOKENS - 1
        assert drafted.num_accepted_tokens == 0


@pytest.mark.parametrize("max_num_batched_tokens", [1, 5, 8])
def test_chunked_prefill_keeps_proposals(max_num_batched_tokens, target, draft, answers):
    """Also a token budget below max_num_seqs * Q rows."""
    runs = []
    for budget in (2048, max_num_batched_tokens):
        llm = engine.make_llm(target, draft, max_num_batched_tokens=budget, max_model_len=128)
        outputs, proposals = generate(llm, None)
        assert [output.outputs[0].token_ids for output in outputs] == answers
        runs.append(sorted((p.request_id, p.position, *p.proposed) for p in proposals))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("strict", [False, True])
def test_raw_logits_go_where_graphs_leave_them(strict, target, draft, answers):
    """Also through tiles; logprobs are read from there."""
    llm = engine.make_llm(
        target, draft, max_model_len=64, strict=strict, enable_prefix_caching=False
    )
    expected = llm.generate(PROMPTS, engine.greedy_params(NUM_TOKENS, logprobs=2))
    step = llm.core._step
    step.raw_logits = torch.full((128, VOCAB_SIZE), float("nan"))
    outputs = llm.generate(PROMPTS, engine.greedy_params(NUM_TOKENS, logprobs=2))
    assert not step.raw_logits[: len(PROMPTS)].isnan().any()
    for output, before, answer in zip(outputs, expected, answers, strict=True):
        assert output.outputs[0].token_ids == answer
        assert output.outputs[0].logprobs == before.outputs[0].logprobs


def test_more_prompts_than_rows(target, draft, answers):
    """Rows and blocks go from a finished request to the next one."""
    llm = engine.make_llm(target, draft, max_num_seqs=2, max_model_len=64)
    outputs = llm.generate(PROMPTS * 3, engine.greedy_params(NUM_TOKENS))
    assert [output.outputs[0].token_ids for output in outputs] == answers * 3


def test_block_0_is_never_written(target, draft, answers):
    llm = engine.make_llm(target, draft, max_model_len=64)
    step = llm.core._step
    decoders = (step.target.decoder, step.speculator.drafter.decoder)
    null_blocks = [
        tensor[0]
        for decoder in decoders
        for cache in decoder.caches
        for tensor in (cache.key, cache.value)
    ]
    for block in null_blocks:
        block.fill_(123.0)
    generate(llm, oracle(answers, PROMPTS, lambda count: count))
    assert all((block == 123.0).all() for block in null_blocks)


def test_statistics_count_what_was_accepted(target, draft, answers):
    llm = engine.make_llm(target, draft, max_model_len=128)
    (output,), proposals = generate(
        llm, oracle(answers, PROMPTS, lambda count: 2), [PROMPTS[0]], max_tokens=1 + 3 * 5
    )
    statistics = output.statistics
    assert statistics.num_prompt_tokens == len(PROMPTS[0])
    assert statistics.num_output_tokens == 16
    assert (statistics.num_steps, statistics.num_drafts) == (5, 5)
    assert statistics.num_draft_tokens == 5 * 3
    assert statistics.num_accepted_tokens_per_pos == [5, 5, 0]
    assert statistics.acceptance_length == 3.0
    assert len(proposals) == 6
