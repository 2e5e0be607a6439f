# SPDX-License-Identifier: Apache-2.0
"""Greedy text: with drafter == without == transformers' generate, token for token, float32 on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.parity.conftest import NUM_PROMPTS
from tests.support import demo


def explain(prompt: list[int], expected: list[int], actual: list[int]) -> str:
    """Where two answers part, and how close the two tokens were for transformers."""
    common = 0
    while common < min(len(expected), len(actual)) and expected[common] == actual[common]:
        common += 1
    if common == min(len(expected), len(actual)):
        return f"one answer is longer: {len(expected)} and {len(actual)} tokens"
    with torch.inference_mode():
        ids = torch.tensor([prompt + expected[:common]])
        logits = demo.transformers_target()(ids).logits[0, -1]
    gap = float(logits[expected[common]] - logits[actual[common]])
    return f"token {common}: {expected[common]} expected, got {actual[common]}, logit gap {gap:.3e}"


def compare(prompt: list[int], expected: list[int], actual: list[int]) -> None:
    assert actual == expected, explain(prompt, expected, actual)


@pytest.mark.parametrize("i", range(NUM_PROMPTS))
def test_greedy_without_drafter_on_humaneval(i, answers):
    actual = answers.without_drafter[i]
    compare(answers.prompts[i], answers.by_transformers(i), actual)


@pytest.mark.parametrize("i", range(NUM_PROMPTS))
def test_greedy_with_drafter_on_humaneval(i, answers):
    actual = answers.with_drafter(i).token_ids
    compare(answers.prompts[i], answers.by_transformers(i), actual)
