# SPDX-License-Identifier: Apache-2.0
"""Targets against transformers: logits and taps of random tiny checkpoints."""

from __future__ import annotations

import pytest
import torch

from tests.support import tiny
from tests.support.runner import PairRunner, relative_error

TOLERANCE = 1e-5
TOKEN_IDS = [(5 * i + i // 3) % 32 for i in range(40)]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return tiny.make_draft(tmp_path_factory.mktemp("draft"))


@torch.inference_mode()
def compare(folder, draft, tap_ids=(0, 2, 3)):
    expected = tiny.load_target(folder)(torch.tensor([TOKEN_IDS]), output_hidden_states=True)
    runner = PairRunner(folder, draft)
    # Prefill in two chunks, the second in the middle of a page.
    logits, taps = zip(
        runner.verify(TOKEN_IDS[:21]), runner.verify(TOKEN_IDS[21:], 21), strict=True
    )
    assert relative_error(torch.cat(logits), expected.logits[0]) < TOLERANCE
    # NOTE: hidden_states[0] is the embedding, so the output of layer i is entry i + 1.
    outputs = torch.cat([expected.hidden_states[i + 1][0] for i in tap_ids], dim=-1)
    assert relative_error(torch.cat(taps), outputs) < TOLERANCE


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (8, 2), (5, 1), (7, 1), (8, 1)]
)
def test_group_sizes(num_heads, num_kv_heads, draft, tmp_path):
    # Qwen3: the one config class that takes any number of heads with its own head_dim.
    tiny.make_target(
        tmp_path, "qwen3", num_attention_heads=num_heads, num_key_value_heads=num_kv_heads
    )
    compare(tmp_path, draft)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_architectures(model_type, tied, draft, tmp_path):
    tiny.make_target(tmp_path, model_type, tie_word_embeddings=tied)
    compare(tmp_path, draft)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling(rope, draft, tmp_path):
    tiny.make_target(tmp_path, rope_parameters=rope)
    compare(tmp_path, draft)
