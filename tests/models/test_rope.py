# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from dflash.checkpoints.config import RopeConfig
from dflash.models.rope import cos_sin_cache

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_table_equals_transformers(rope_type):
    scaling = SCALINGS[rope_type]
    parameters = {"rope_type": rope_type, "rope_theta": 1e4, **scaling}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=256,
        rope_parameters=parameters,
    )  # fmt: skip
    positions = torch.arange(200)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1, 200, 64), positions)
    table = cos_sin_cache(RopeConfig(1e4, rope_type, scaling, 64, True), 200, torch.device("cpu"))
    torch.testing.assert_close(table[:, :32], cos[0, :, :32], rtol=0, atol=2e-5)
    torch.testing.assert_close(table[:, 32:], sin[0, :, :32], rtol=0, atol=2e-5)


def test_partial_rotary_has_fewer_columns():
    table = cos_sin_cache(RopeConfig(1e4, "default", {}, 32, True), 10, torch.device("cpu"))
    assert table.shape == (10, 32)
    torch.testing.assert_close(table[0], torch.tensor([1.0] * 16 + [0.0] * 16))


def test_unknown_scaling_is_named():
    with pytest.raises(ValueError, match="rope_type 'dynamic' is not supported"):
        cos_sin_cache(RopeConfig(1e4, "dynamic", {}, 64, True), 10, torch.device("cpu"))
