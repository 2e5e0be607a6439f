# SPDX-License-Identifier: Apache-2.0
"""Where a request ends: stop tokens and strings inside an accepted run, max_tokens, max_model_len."""

from __future__ import annotations

import pytest

from tests.engine.conftest import NUM_TOKENS, PROMPTS
from tests.engine.test_step import oracle
from tests.support import engine, tiny


@pytest.fixture
def llm(target, draft, answers):
    """Every draft is right: a block commits N + 1 tokens unless something ends the request."""
    llm = engine.make_llm(target, draft, max_model_len=64)
    engine.Recorder(llm, oracle(answers, PROMPTS, lambda count: count))
    return llm


def first_seen(answer, after: int) -> int:
    """The first index past `after` whose token did not occur before it."""
    return next(i for i in range(after + 1, len(answer)) if answer[i] not in answer[:i])


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_stop_token_inside_an_accepted_run(after, llm, answers):
    end = first_seen(answers[0], after)
    params = engine.greedy_params(NUM_TOKENS, stop_token_ids=[answers[0][end]])
    (output,) = llm.generate([PROMPTS[0]], params)
    assert output.outputs[0].token_ids == answers[0][: end + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.statistics.num_output_tokens == end + 1


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_inside_an_accepted_run(ignore_eos, target, draft, answers, tmp_path):
    """The checkpoint's own end-of-sequence token."""
    end = first_seen(answers[0], 2)
    folder = tiny.make_target(tmp_path, eos_token_id=answers[0][end])
    llm = engine.make_llm(folder, draft, max_model_len=64)
    engine.Recorder(llm, oracle(answers, PROMPTS, lambda count: count))
    (output,) = llm.generate([PROMPTS[0]], engine.greedy_params(20, ignore_eos=ignore_eos))
    assert output.outputs[0].token_ids == answers[0][: 20 if ignore_eos else end + 1]
    assert output.outputs[0].finish_reason == ("length" if ignore_eos else "stop")


def test_stop_string_inside_an_accepted_run(llm, answers):
    """The tokens end with the one that completed the string; what was accepted behind it is cut."""
    blocks = 4  # tokens a step: output 1..4, 5..8, ...
    texts = [llm.tokenizer.decode(answers[0][: i + 1]) for i in range(NUM_TOKENS)]
    words = [(i, f"w{token}") for i, token in enumerate(answers[0])]
    end, stop = next((i, w) for i, w in words if i > 2 and i % blocks and w not in texts[i - 1])
    (output,) = llm.generate([PROMPTS[0]], engine.greedy_params(NUM_TOKENS, stop=stop))
    assert output.outputs[0].text == texts[end][: texts[end].index(stop)]
    assert output.outputs[0].token_ids == answers[0][: end + 1]
    assert output.outputs[0].finish_reason == "stop"
    statistics = output.statistics
    assert statistics.num_output_tokens == end + 1
    assert 1 + statistics.num_drafts + statistics.num_accepted_tokens == end + 1
    assert sum(statistics.num_accepted_tokens_per_pos) == statistics.num_accepted_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_max_tokens_cuts_an_accepted_run(max_tokens, llm, answers):
    outputs = llm.generate(PROMPTS, engine.greedy_params(max_tokens))
    for output, answer in zip(outputs, answers, strict=True):
        assert output.outputs[0].token_ids == answer[:max_tokens]
        assert output.outputs[0].finish_reason == "length"
        assert output.statistics.num_output_tokens == max_tokens


@pytest.mark.parametrize("room", range(1, 8))
@pytest.mark.parametrize("kv_block_size", [1, 16])
def test_a_block_that_crosses_max_model_len(room, kv_block_size, target, draft, answers):
    """Every token up to the limit is right and none is behind it, wherever the last block stands."""
    prompt = PROMPTS[3]
    llm = engine.make_llm(
        target, draft, max_model_len=len(prompt) + room, kv_block_size=kv_block_size
    )
    follow = oracle(answers, PROMPTS, lambda count: count)
    engine.Recorder(llm, lambda _, position, count: follow(3, position, count))
    (output,) = llm.generate([prompt], engine.greedy_params(NUM_TOKENS))
    assert output.outputs[0].token_ids == answers[3][:room]
    assert output.outputs[0].finish_reason == "length"


def test_a_prompt_as_long_as_max_model_len(target, draft):
    llm = engine.make_llm(target, draft, max_model_len=16)
    with pytest.raises(ValueError, match="16"):
        llm.generate([[3] * 16])
    (output,) = llm.generate([[3] * 15])
    assert len(output.outputs[0].token_ids) == 1


def test_refused_prompts_leave_the_engine_whole(llm, answers):
    for bad in ([], [32], [-1]):
        with pytest.raises(ValueError):
            llm.generate([bad])
    outputs = llm.generate([PROMPTS[0]], engine.greedy_params(1))
    assert outputs[0].outputs[0].token_ids == answers[0][:1]
