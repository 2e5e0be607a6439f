# SPDX-License-Identifier: Apache-2.0
"""A lost device stops the engine, and says with whom."""

from __future__ import annotations

import pytest

from dflash.errors import DflashError
from tests.support.engine import greedy_params, make_llm

from .conftest import NUM_TOKENS, PROMPTS


def test_a_cuda_error_stops_the_engine_and_names_requests_and_bucket(target, draft, monkeypatch):
    llm = make_llm(target, draft, max_model_len=64)
    decode = llm.core._runner.decode
    calls = []

    def lost(batch):
        calls.append(batch)
        if len(calls) < 3:
            return decode(batch)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(llm.core._runner, "decode", lost)
    with pytest.raises(DflashError, match=r"illegal memory access.*new process") as raised:
        llm.generate(PROMPTS, greedy_params(NUM_TOKENS))
    assert "requests [0, 1, 2, 3]" in str(raised.value)
    with pytest.raises(DflashError, match="the engine stopped"):
        llm.generate(PROMPTS[:1], greedy_params(NUM_TOKENS))
    assert not llm.core.scheduler.has_work


def test_a_device_lost_behind_another_error_stops_the_engine_too(target, draft, monkeypatch):
    llm = make_llm(target, draft, max_model_len=64)

    class Lost:
        def item(self):
            raise RuntimeError("CUDA error: unspecified launch failure")

    def fail(batch):
        monkeypatch.setattr(llm.core._step, "state", type("State", (), {"step": Lost()})())
        raise ValueError("out of luck")

    monkeypatch.setattr(llm.core._runner, "decode", fail)
    with pytest.raises(DflashError, match="unspecified launch failure"):
        llm.generate(PROMPTS, greedy_params(NUM_TOKENS))
    with pytest.raises(DflashError, match="make a new process"):
        llm.generate(PROMPTS[:1], greedy_params(NUM_TOKENS))
