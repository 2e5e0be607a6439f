# SPDX-License-Identifier: Apache-2.0
"""Both engines behind the one interface: ours on the CPU, vLLM's as a stand-in that counts as vLLM does."""

import os
import sys
from itertools import repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from benchmarks.end_to_end import peers, vs_vllm
from benchmarks.end_to_end.demo_vs_vllm import offline, streamed
from benchmarks.end_to_end.peers import Dflash, Vllm

from tests.support import tiny
from tests.support.engine import greedy_params, make_llm

N = 3
PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7], [4] * 11, [3, 5]]


class FakeEngine:
    """Prompts take one step; then three tokens a step, of which outputs have all so far."""

    def __init__(self):
        self.left, self.outputs = {}, {}

    def add_request(self, name, prompt, params):
        assert prompt["prompt_token_ids"]
        self.left[name], self.outputs[name] = params.max_tokens, []

    def step(self):
        step = []
        for name in list(self.left):
            tokens = self.outputs[name]
            tokens += [1] * min(self.left[name] - len(tokens), 3 if tokens else 1)
            step.append(
                SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)])
            )
            if len(tokens) == self.left[name]:
                del self.left[name]
        return step

    def abort_request(self, names):
        for name in names:
            self.left.pop(name, None)


class FakeLLM:
    def __init__(self, model, **options):
        self.model, self.options, self.llm_engine, self.asked = model, options, FakeEngine(), []

    def generate(self, requests, params, use_tqdm):
        self.asked.append((requests, params))


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.__version__ = "0.26.0"
    module.LLM, module.SamplingParams = FakeLLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return module


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return tiny.make_target(folder / "target"), tiny.make_draft(folder / "draft")


def make_core(pair, **arguments):
    return make_llm(
        *pair, num_speculative_tokens=N, max_num_seqs=4, enable_prefix_caching=False, **arguments
    )


def synthetic(pair):
    """Every draft is accepted."""
    return make_core(
        pair, rejection_sample_method="synthetic", synthetic_acceptance_rates=(1.0,) * N
    )


def test_vllm_is_asked_for_its_own_speculator(vllm):
    engine = Vllm(Path("t"), {"model": "d", "num_speculative_tokens": N}, max_model_len=99)
    options = engine._llm.options
    assert options["speculative_config"] == {
        "method": "dflash", "model": "d", "num_speculative_tokens": N,
    }  # fmt: skip
    assert (engine._llm.model, engine.version) == ("t", "0.26.0")
    assert options["max_model_len"] == 99 and not options["enable_prefix_caching"]
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" and os.environ[peers.SWITCH] == "0"
    assert "speculative_config" not in Vllm(Path("t"), None)._llm.options


def test_vllm_says_what_is_new(vllm):
    engine = Vllm(Path("t"), None)
    engine.add(7, [1], 5)
    assert engine.step() == [(7, 1)]
    engine.add(3, [1], 2)
    assert engine.step() == [(7, 3), (3, 1)]
    assert engine.step() == [(7, 1), (3, 1)]
    assert engine.step() == []
    engine.add(7, [1], 100)
    engine.clear()
    assert engine.step() == []
    engine.add(7, [1], 4)  # a number may come again
    assert engine.step() + engine.step() == [(7, 1), (7, 3)]
    assert engine.draft_milliseconds(1) is None


def test_the_median_of_the_last_draft_steps(vllm):
    engine = Vllm(Path("t"), None)
    times = [99.0] * 5 + [1.0] * 14 + [2.0] * 16
    engine._drafts = [SimpleNamespace(milliseconds=time) for time in times]
    assert engine.draft_milliseconds(1) == 2.0


def test_ours_is_measured_in_its_steady_state(pair, monkeypatch):
    monkeypatch.setattr(vs_vllm, "WINDOW", 3)
    monkeypatch.setattr(vs_vllm, "MAX_OUTPUT", 120)
    monkeypatch.setattr(vs_vllm, "prompts", lambda seed, length: repeat([4] * length))
    engine = Dflash(synthetic(pair).core)
    row = vs_vllm.measure_iterations(engine, context=20, batch=3, with_draft=False)
    assert (row["context"], row["batch"], row["acceptance_length"]) == (20, 3, N + 1)
    low, high = row["spread_ms"]
    assert 0 < low <= row["iteration_ms"] <= high
    assert not engine._core.scheduler.has_work


def test_streamed_counts_what_the_engine_counts(pair):
    llm = make_core(pair)
    llm.generate(PROMPTS, greedy_params(20, ignore_eos=True))
    engine = Dflash(llm.core)
    for num_given in (1, len(PROMPTS)):
        run = streamed(20, engine, PROMPTS, num_given)
        assert run.num_tokens == 80
        assert run.acceptance_length == pytest.approx(llm.statistics.acceptance_length)
        assert not llm.core.scheduler.has_work


def test_streamed_acceptance_leaves_the_prompts_token_out(pair):
    # 1 + 4 + 4 + 4 + 4 + 3
    run = streamed(20, Dflash(synthetic(pair).core), PROMPTS, 2)
    assert run.acceptance_length == pytest.approx(19 / 5)


def test_streamed_gives_no_more_at_once_than_it_may(vllm):
    engine = Vllm(Path("t"), None)
    most, step = 0, engine.step

    def counted():
        nonlocal most
        most = max(most, len(engine._engine.left))
        return step()

    engine.step = counted
    run = streamed(8, engine, PROMPTS, 3)
    assert (most, run.num_tokens, run.acceptance_length) == (3, 32, pytest.approx(7 / 3))


def test_offline_asks_in_groups(vllm):
    engine = Vllm(Path("t"), None)
    assert offline(8, engine, PROMPTS, 3).num_tokens == 32
    asked = [[request["prompt_token_ids"] for request in group] for group, _ in engine._llm.asked]
    assert asked == [PROMPTS[:3], PROMPTS[3:]]
    params = engine._llm.asked[0][1]
    assert (params.temperature, params.max_tokens, params.ignore_eos) == (0.0, 8, True)
