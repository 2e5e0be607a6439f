# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dflash.checkpoints import (
    SUPPORTED_TARGETS,
    LayerAttention,
    load_target,
    parse_target_config,
)
from dflash.errors import CheckpointError
from tests.checkpoints.support import DRAFT, TARGET, target_tensors, without, write

LLAMA = {**TARGET, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN2 = {**TARGET, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


def test_architectures_differ_in_norms_and_biases():
    def flags(config):
        decoder = parse_target_config(config).decoder
        return decoder.qk_norm, decoder.qkv_bias, decoder.o_bias

    assert flags(TARGET) == (True, False, False)
    assert flags(LLAMA) == (False, False, False)
    assert flags(QWEN2) == (False, True, False)
    assert flags({**TARGET, "attention_bias": True}) == (True, True, True)
    assert flags({**LLAMA, "attention_bias": True}) == (False, True, True)


def test_defaults():
    config = parse_target_config(
        without(LLAMA, "num_key_value_heads", "rope_theta", "head_dim", "torch_dtype")
    )
    assert (config.decoder.num_kv_heads, config.decoder.head_dim) == (4, 8)
    assert config.decoder.rope.theta == 10000.0
    assert config.dtype == torch.float32
    assert parse_target_config(without(TARGET, "head_dim")).decoder.head_dim == 128
    assert parse_target_config({**LLAMA, "head_dim": None}).decoder.head_dim == 8


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (2, 7, (2, 7)),
        (2, [7, 2], (2, 7)),
        (None, [7], (7,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_joined(config, generation, expected):
    generation_config = None if generation is None else {"eos_token_id": generation}
    parsed = parse_target_config({**TARGET, "eos_token_id": config}, generation_config)
    assert parsed.eos_token_ids == expected


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ("default", {})),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", {"factor": 2.0})),
        ({"rope_scaling": LLAMA3}, ("llama3", without(LLAMA3, "rope_type"))),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}},
            (
                "yarn",
                {
                    "factor": 4.0,
                    "beta_fast": 16.0,
                    "original_max_position_embeddings": 128,
                    "truncate": True,
                },
            ),
        ),
    ],
)
def test_rope_types_in_both_spellings(keys, expected):
    rope = parse_target_config({**TARGET, **keys}).decoder.rope
    assert (rope.rope_type, rope.scaling) == expected
    assert (rope.theta, rope.rotary_dim, rope.is_neox) == (10000.0, 16, True)
    scaling = dict(keys.get("rope_scaling", {}))
    new = {"rope_parameters": {**scaling, "rope_theta": 10000.0}}
    assert parse_target_config({**without(TARGET, "rope_theta"), **new}).decoder.rope == rope


def test_partial_rotary_factor_in_both_places():
    for keys in (
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
    ):
        assert parse_target_config({**TARGET, **keys}).decoder.rope.rotary_dim == 4


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({}, [None] * 3),
        ({"sliding_window": 8}, [None] * 3),
        ({**WINDOW, "use_sliding_window": False}, [None] * 3),
        ({**WINDOW, "max_window_layers": 2}, [None, None, 8]),
        ({**WINDOW, "max_window_layers": 0}, [8] * 3),
        (WINDOW, [None] * 3),  # transformers' default: from layer 28 on
        ({**WINDOW, "layer_types": [FULL, SLIDING, FULL]}, [None, 8, None]),
    ],
)
def test_windows_are_transformers_own(keys, windows):
    layers = parse_target_config({**TARGET, **keys}).decoder.layers
    assert layers == tuple(LayerAttention(True, window) for window in windows)
    theirs = AutoConfig.for_model("qwen3", **without({**TARGET, **keys}, "model_type"))
    slides = [kind == SLIDING for kind in theirs.layer_types]
    assert [w is not None for w in windows] == slides


REFUSALS = [
    ({**TARGET, "architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
    ({**TARGET, "architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM is not supported"),
    ({**TARGET, "architectures": ["A", "B"]}, "one name"),
    (without(TARGET, "architectures"), "no 'architectures'"),
    (DRAFT, "is a drafter"),
    ({**TARGET, "quantization_config": {"quant_method": "awq"}}, "'awq'"),
    ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
    ({**TARGET, "hidden_act": "gelu"}, "hidden_act"),
    ({**TARGET, "rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
    ({**TARGET, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({**TARGET, "rope_scaling": {"rope_type": "yarn"}}, "factor' is missing"),
    ({**TARGET, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({**TARGET, "rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, "mrope_section"),
    (
        {**TARGET, "rope_parameters": {FULL: {"rope_theta": 1.0}, SLIDING: {"rope_theta": 2.0}}},
        "differs between layer types",
    ),
    ({**TARGET, "partial_rotary_factor": 0.2}, "rotary dimensions"),
    ({**TARGET, "rope_theta": -1.0}, "rope_theta"),
    ({**TARGET, "layer_types": [FULL, SLIDING, FULL], "sliding_window": 8}, "use_sliding_window"),
    ({**LLAMA, "layer_types": [SLIDING] * 3, **WINDOW}, "LlamaForCausalLM with sliding"),
    ({**TARGET, "layer_types": [FULL, FULL, "chunked_attention"]}, "chunked_attention"),
    ({**without(LLAMA, "head_dim"), "hidden_size": 33}, "head_dim"),
    ({**TARGET, "num_hidden_layers": 0}, "num_hidden_layers"),
    ({**TARGET, "vocab_size": "many"}, "vocab_size"),
    ({**TARGET, "eos_token_id": ["x"]}, "eos_token_id"),
    (without(TARGET, "max_position_embeddings"), "max_position_embeddings' is missing"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_refused_by_name(config, message):
    with pytest.raises(CheckpointError, match=message):
        parse_target_config(config)


def test_a_refusal_lists_what_is_supported():
    with pytest.raises(CheckpointError) as error:
        parse_target_config({**TARGET, "architectures": ["GemmaForCausalLM"]})
    assert all(name in str(error.value) for name in SUPPORTED_TARGETS)


@pytest.mark.parametrize("config", [TARGET, LLAMA, QWEN2, {**TARGET, "attention_bias": True}])
@pytest.mark.parametrize("tied", [False, True])
def test_loads_what_transformers_saves(tmp_path, config, tied):
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**without({**config, "tie_word_embeddings": tied}, "torch_dtype"))
    )
    theirs.save_pretrained(tmp_path)
    parsed, weights, directory = load_target(tmp_path)
    assert directory == tmp_path and parsed.tie_word_embeddings == tied
    state = theirs.state_dict()
    torch.testing.assert_close(weights.embed_tokens, state["model.embed_tokens.weight"])
    torch.testing.assert_close(weights.lm_head, state["lm_head.weight"])
    assert (weights.lm_head is weights.embed_tokens) == tied
    for i, layer in enumerate(weights.layers):
        name = f"model.layers.{i}.self_attn."
        qkv = torch.cat([state[f"{name}{part}_proj.weight"] for part in "qkv"])
        torch.testing.assert_close(layer.qkv_proj, qkv, rtol=0, atol=0)
        has_bias = f"{name}q_proj.bias" in state
        assert (layer.qkv_bias is not None) == has_bias
        if has_bias:
            bias = torch.cat([state[f"{name}{part}_proj.bias"] for part in "qkv"])
            torch.testing.assert_close(layer.qkv_bias, bias, rtol=0, atol=0)
        assert (layer.o_bias is not None) == (f"{name}o_proj.bias" in state)
        mlp = f"model.layers.{i}.mlp."
        gate_up = torch.cat([state[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")])
        torch.testing.assert_close(layer.gate_up_proj, gate_up, rtol=0, atol=0)
        torch.testing.assert_close(layer.down_proj, state[f"{mlp}down_proj.weight"])


def test_generation_config_joins_the_eos_ids(tmp_path):
    write(tmp_path, TARGET, target_tensors(TARGET))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9]}')
    assert load_target(tmp_path)[0].eos_token_ids == (2, 9)
