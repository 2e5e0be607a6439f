# SPDX-License-Identifier: Apache-2.0
"""Tokens that the head samples itself are those of its logits, whatever a batch mixes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dflash import SamplingParams
from dflash.engine import step as step_module
from dflash.engine.request import Variant
from dflash.models import target as target_module
from dflash.speculators import buffers
from tests.engine.conftest import NUM_TOKENS, PROMPTS
from tests.support import engine

GREEDY = {"temperature": 0.0}
PLAIN = {"temperature": 0.9}
UP_TO_128 = range(1, 129)
CASES = {
    "greedy": [GREEDY],
    "plain": [PLAIN],
    "greedy and plain": [GREEDY, PLAIN],
    "logprobs": [GREEDY, GREEDY | {"logprobs": 1}],
    "processed": [GREEDY, PLAIN, PLAIN | {"top_k": 5}, GREEDY | {"presence_penalty": 0.5}],
}


def counted(monkeypatch, module, name) -> list[int]:
    """Rows of every call of module.name."""
    function, rows = getattr(module, name), []

    def wrapper(hidden, *args, **kwargs):
        rows.append(len(hidden))
        return function(hidden, *args, **kwargs)

    monkeypatch.setattr(module, name, wrapper)
    return rows


def sample_in_head(monkeypatch, llm, num_rows=UP_TO_128):
    """As if the head's GEMM sampled so many rows."""
    monkeypatch.setattr(llm.core._step.target, "samples_in_head", num_rows.__contains__)


def generate(llm, kinds, max_tokens=None):
    params = [
        SamplingParams(max_tokens=max_tokens or NUM_TOKENS, seed=i, **kinds[i % len(kinds)])
        for i in range(len(PROMPTS))
    ]
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)]


def make(target, draft, **arguments):
    arguments = {"max_model_len": 128, "enable_prefix_caching": False} | arguments
    return engine.make_llm(target, draft, **arguments)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strict", [False, True])
def test_tokens_are_those_of_the_logits(name, strict, target, draft, answers, monkeypatch):
    llm = make(target, draft, strict=strict)
    expected = generate(llm, CASES[name])
    sampled = counted(monkeypatch, step_module, "lm_head_sample")
    assert generate(llm, CASES[name]) == expected and not sampled
    sample_in_head(monkeypatch, llm)
    assert generate(llm, CASES[name]) == expected
    assert sampled or name in ("logprobs", "processed")  # their own batches do not: see below
    if name == "greedy":
        assert expected == answers


@pytest.mark.parametrize(
    "variant,num_rows,method,expected",
    [
        (Variant(), 128, "standard", True),
        (Variant(), 129, "match", False),
        (Variant(), 240, "match", True),
        (Variant(), 0, "match", False),
        (Variant(num_logprobs=0), 8, "match", False),
        (Variant(True, is_plain=True), 8, "match", True),
        (Variant(True, is_plain=True), 8, "synthetic", True),
        (Variant(True, is_plain=True), 8, "standard", False),
        (Variant(True, is_plain=True), 8, "block", False),
        (Variant(True, is_plain=False), 8, "match", False),
        (Variant(True, num_logprobs=2, is_plain=True), 8, "match", False),
    ],
)
def test_which_batches_the_head_samples(
    variant, num_rows, method, expected, target, draft, monkeypatch
):
    llm = make(target, draft)
    step = llm.core._step
    step.method = method
    batch = SimpleNamespace(variant=variant, num_rows=num_rows, logits_rows=None)
    sample_in_head(monkeypatch, llm, {*UP_TO_128, 240})
    assert step.samples_in_head(batch) == expected
    sample_in_head(monkeypatch, llm, ())
    assert not step.samples_in_head(batch)


@pytest.mark.parametrize(
    "variant,num_rows,expected",
    [
        (Variant(), 240, False),
        (Variant(num_logprobs=1), 240, True),  # the other graph leaves tokens only
        (Variant(num_logprobs=1), 200, False),
        (Variant(True, is_plain=True), 240, False),
        (Variant(True, is_plain=True), 200, True),
        (Variant(True), 240, True),
    ],
)
def test_which_graph_serves(variant, num_rows, expected, target, draft, monkeypatch):
    llm = make(target, draft)
    sample_in_head(monkeypatch, llm, {*UP_TO_128, 240})
    llm.core._step.method = "match"
    batch = SimpleNamespace(variant=variant, num_rows=num_rows, logits_rows=None)
    assert llm.core._step.needs_all_logits(batch) == expected


def test_the_plan_is_asked_for_as_many_rows_once(target, draft, monkeypatch):
    model, asked = make(target, draft).core._step.target, []

    def plan(hidden, weight, vocab_size):
        asked.append(len(hidden))
        assert hidden.shape[1] == weight.shape[1] and vocab_size == model.vocab_size
        return (128, 3, 1) if len(hidden) in (1, 24) else None

    monkeypatch.setattr(target_module, "lm_head_sample_plan", plan)
    model._samples_in_head.clear()
    assert [model.samples_in_head(rows) for rows in (0, 1, 20, 24, 24, 20)] == [
        False, True, False, True, True, False,
    ]  # fmt: skip
    assert asked == [0, 1, 20, 24]


def test_only_as_many_rows_as_the_head_takes(target, draft, answers, monkeypatch):
    llm = make(target, draft)
    sampled = counted(monkeypatch, step_module, "lm_head_sample")
    limit = engine.longest_block(draft) + 1  # the rows of one request
    sample_in_head(monkeypatch, llm, range(1, limit + 1))
    assert generate(llm, [GREEDY]) == answers
    assert {limit} <= set(sampled) and max(sampled) <= limit


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_rows_of_other_methods_need_logits(method, target, draft, monkeypatch):
    llm = make(target, draft, rejection_sample_method=method, draft_sample_method="gumbel")
    expected = generate(llm, [PLAIN]), generate(llm, [GREEDY])
    sampled = counted(monkeypatch, step_module, "lm_head_sample")
    sample_in_head(monkeypatch, llm)
    assert generate(llm, [PLAIN]) == expected[0] and not sampled
    assert generate(llm, [GREEDY]) == expected[1] and sampled


def test_synthetic_acceptance_from_tokens(target, draft, monkeypatch):
    n = engine.longest_block(draft)
    llm = make(
        target,
        draft,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=(0.7,) * n,
    )
    expected = generate(llm, [GREEDY, PLAIN])
    sampled = counted(monkeypatch, step_module, "lm_head_sample")
    sample_in_head(monkeypatch, llm)
    assert generate(llm, [GREEDY, PLAIN]) == expected and sampled


@pytest.mark.parametrize("method", ["dflash", "autoregressive"])
def test_drafts_are_those_of_the_logits(method, target, draft, answers, monkeypatch):
    arguments = {"draft_method": method} if method == "autoregressive" else {}
    drafter = target if method == "autoregressive" else draft
    llm = make(target, drafter, **arguments)
    recorder = engine.Recorder(llm)
    assert generate(llm, [GREEDY]) == answers
    expected = [p.proposed for p in recorder.proposals]
    recorder.proposals.clear()
    sampled = counted(monkeypatch, buffers, "lm_head_sample")
    monkeypatch.setattr(
        buffers, "lm_head_sample_plan", lambda hidden, weight, vocab_size: (16, 3, 1)
    )
    assert generate(llm, [GREEDY]) == answers
    assert [p.proposed for p in recorder.proposals] == expected and sampled


def test_recorded_drafts_need_logits(target, draft, monkeypatch):
    llm = make(target, draft, rejection_sample_method="standard", draft_sample_method="gumbel")
    expected = generate(llm, [PLAIN])
    sampled = counted(monkeypatch, buffers, "lm_head_sample")
    monkeypatch.setattr(
        buffers, "lm_head_sample_plan", lambda hidden, weight, vocab_size: (16, 3, 1)
    )
    assert generate(llm, [PLAIN]) == expected and not sampled
