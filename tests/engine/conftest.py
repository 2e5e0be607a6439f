# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.support import demo, tiny

PROMPTS = [
    [3, 4, 5, 6],
    [9],
    [7] * 11,
    [12, 30, 8, 8, 21, 17, 5, 29, 11, 14, 3, 10, 22, 19, 6, 2, 2],
]
NUM_TOKENS = 40


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("target"), eos_token_id=None)


@pytest.fixture(scope="session")
def draft(tmp_path_factory):
    """One causal sliding layer and one full layer: their K/V are read at every distance."""
    return tiny.make_draft(
        tmp_path_factory.mktemp("draft"),
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    )


@pytest.fixture(scope="session")
def answers(target) -> list[list[int]]:
    """NUM_TOKENS greedy tokens for every prompt, by transformers."""
    model = tiny.load_target(target)
    answers = [demo.greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert all(len(answer) == NUM_TOKENS for answer in answers)
    assert all(len(set(answer)) > 4 for answer in answers)  # not one token over and over
    return answers


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Tiny tensors: a second thread only waits."""
