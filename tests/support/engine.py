# SPDX-License-Identifier: Apache-2.0
"""The engine as tests use it: float32 on the CPU, with the blocks it drafted and verified."""

from __future__ import annotations

from dflash.engine.llm import LLM
from dflash.engine.sampling_params import SamplingParams


def make_llm(target, draft=None, **arguments) -> LLM:
    arguments = {"dtype": "float32", "device": "cpu"} | arguments
    return LLM(str(target), str(draft) if draft else None, **arguments)


def greedy_params(max_tokens: int, **arguments) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **arguments)
