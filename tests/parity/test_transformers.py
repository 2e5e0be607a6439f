# SPDX-License-Identifier: Apache-2.0
"""Greedy text: with drafter == without == transformers' generate, token for token, float32 on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.parity.conftest import MAX_TOKENS
from tests.support import demo, engine


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


def compare(prompts, expected, outputs) -> None:
    differences = [
        f"prompt {i}: {explain(prompt, reference, output.token_ids)}"
        for i, (prompt, reference, output) in enumerate(
            zip(prompts, expected, outputs, strict=True)
        )
        if list(output.token_ids) != reference
    ]
    assert not differences, "\n".join(differences)


@pytest.mark.slow
@pytest.mark.parametrize("with_draft", [True, False], ids=["with drafter", "without drafter"])
def test_greedy_equals_transformers_on_humaneval(with_draft, prompts, transformers_answers):
    draft = demo.draft_directory() if with_draft else None
    llm = engine.make_llm(demo.target_directory(), draft)
    outputs = llm.generate(prompts, engine.greedy_params(MAX_TOKENS))
    compare(prompts, transformers_answers, outputs)
