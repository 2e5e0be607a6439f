# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from dflash.checkpoints import parse_draft_config
from dflash.checkpoints.demo import demo_draft
from dflash.errors import CheckpointError
from tests.checkpoints.support import DRAFT, SPECULATORS, TARGET, with_dflash, without


def test_authors_dialect():
    config = parse_draft_config(DRAFT)
    assert config.dialect == "dflash"
    assert config.target_layer_ids == (0, 2)
    assert (config.target_hidden_size, config.num_target_layers) == (32, 3)
    assert (config.mask_token_id, config.draft_block_size) == (5, 4)
    assert config.draft_vocab_size is None
    assert (config.logit_scale, config.embedding_scale, config.value_scale) == (1.0, 1.0, 1.0)
    assert not config.has_sinks
    assert config.dtype == torch.bfloat16
    assert config.decoder.qk_norm and not config.decoder.qkv_bias and not config.decoder.o_bias
    assert config.decoder.rope.theta == 10000.0 and config.decoder.rope.is_neox


def test_speculators_dialect_equals_the_authors():
    config = parse_draft_config(SPECULATORS)
    assert config.dialect == "speculators"
    assert config.target_layer_ids == (0, 2)  # aux ids are already shifted by one
    authors = parse_draft_config(DRAFT)
    assert config.decoder == authors.decoder
    assert config.mask_token_id == authors.mask_token_id
    assert config.draft_block_size == authors.draft_block_size
    assert config.draft_vocab_size is None


def test_speculators_reduced_vocabulary_and_target_width():
    config = parse_draft_config({**SPECULATORS, "draft_vocab_size": 24, "target_hidden_size": 96})
    assert (config.draft_vocab_size, config.target_hidden_size) == (24, 96)


def test_demo_drafter():
    config = parse_draft_config(json.loads((demo_draft() / "config.json").read_text()))
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert (config.draft_block_size, config.mask_token_id, config.num_target_layers) == (8, 16, 30)
    assert all(not layer.causal and layer.window is None for layer in config.decoder.layers)


def test_every_scale_and_switch_is_read():
    config = parse_draft_config(
        {
            **with_dflash(
                attention_value_scale=0.5, input_embedding_scale=3, attention_sink_bias=True
            ),
            "logit_scale": 0.25,
            "attention_bias": True,
            "is_neox_style": False,
            "partial_rotary_factor": 0.5,
        }
    )
    assert (config.value_scale, config.embedding_scale, config.logit_scale) == (0.5, 3.0, 0.25)
    assert config.has_sinks and config.decoder.qkv_bias and config.decoder.o_bias
    assert not config.decoder.rope.is_neox and config.decoder.rope.rotary_dim == 8


def test_sinks_by_the_top_level_key():
    assert parse_draft_config({**DRAFT, "add_swa_attention_sink_bias": True}).has_sinks


def test_block_size_inside_dflash_config():
    assert (
        parse_draft_config(without(with_dflash(block_size=8), "block_size")).draft_block_size == 8
    )


def test_legacy_layer_ids_are_shifted():
    config = {**DRAFT, "dflash_config": {"mask_token_id": 5, "layer_ids": [1, 3]}}
    assert parse_draft_config(config).target_layer_ids == (0, 2)


MASK_KEYS = ["mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"]


@pytest.mark.parametrize("first", range(len(MASK_KEYS)))
def test_mask_token_lookup_order(first):
    config = {**DRAFT, "dflash_config": {"target_layer_ids": [0, 2]}}
    config |= {key: 10 + i for i, key in enumerate(MASK_KEYS) if i >= first}
    assert parse_draft_config(config).mask_token_id == 10 + first
    config["dflash_config"] = {**config["dflash_config"], "mask_token_id": 0}
    assert parse_draft_config(config).mask_token_id == 0


REFUSALS = [
    ({**DRAFT, "architectures": ["DFlash2DraftModel"]}, "DFlash2 drafter, which is not built"),
    ({**DRAFT, "architectures": ["Qwen3DSparkModel"]}, "DSpark drafter, which is not built"),
    ({**DRAFT, "architectures": ["DSparkDraftModel"]}, "DSparkDraftModel"),
    ({**SPECULATORS, "speculators_model_type": "dflash2"}, "DFlash2"),
    ({**SPECULATORS, "speculators_model_type": "dspark"}, "DSpark"),
    ({**SPECULATORS, "speculators_model_type": "eagle3"}, "'eagle3'"),
    ({**DRAFT, "architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3"),
    ({**DRAFT, "architectures": ["DFlashLagunaForCausalLM"]}, "DFlashLagunaForCausalLM"),
    (TARGET, "is a target, not a drafter"),
    (without(DRAFT, "architectures"), "no 'architectures'"),
    ({**DRAFT, "open_spec_config_version": "0.0.0"}, "Open Spec Config"),
    ({**DRAFT, "conv_kernel_size": 2}, "conv_kernel_size.*DFlash2"),
    (with_dflash(selector_rank=256), "selector_rank.*DFlash2"),
    ({**DRAFT, "markov_rank": 256}, "markov_rank.*DSpark"),
    (with_dflash(projector_type="domino"), "projector_type.*Domino"),
    (with_dflash(sample_from_anchor=True), "sample_from_anchor"),
    ({**DRAFT, "sample_from_anchor": True}, "sample_from_anchor"),
    ({**SPECULATORS, "sample_from_anchor": True}, "sample_from_anchor"),
    (with_dflash(use_aux_hidden_state=False), "use_aux_hidden_state"),
    ({**DRAFT, "use_aux_hidden_state": False}, "use_aux_hidden_state"),
    ({**DRAFT, "mask_hidden": True}, "mask_hidden"),
    ({**DRAFT, "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({**DRAFT, "output_multiplier": 2.0}, "output_multiplier"),
    ({**DRAFT, "use_qk_norm": False}, "use_qk_norm"),
    ({**DRAFT, "quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (with_dflash(surprise=1, another=2), "unknown dflash_config key 'another, surprise'"),
    (with_dflash(mask_token_id=None), "mask token is missing"),
    (with_dflash(target_layer_ids=None), "target_layer_ids' is missing"),
    (with_dflash(target_layer_ids=[]), "target_layer_ids"),
    (with_dflash(target_layer_ids=[-1]), "target_layer_ids"),
    (
        with_dflash(target_layer_ids=[0, 2, 0]),
        r"target_layer_ids' names layers \[0\] more than once",
    ),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": [3, 3]}, r"names layers \[2\] more than once"),
    (with_dflash(causal="yes"), "causal"),
    (with_dflash(block_size=8), "block_size is 4 at the top level but 8"),
    (without(DRAFT, "block_size"), "block_size' is missing"),
    ({**DRAFT, "block_size": 1}, "block_size"),
    (without(DRAFT, "rope_theta"), "rope_theta"),
    (without(DRAFT, "hidden_size"), "hidden_size' is missing"),
    (without(DRAFT, "rms_norm_eps"), "rms_norm_eps' is missing"),
    ({**DRAFT, "hidden_act": "gelu"}, "hidden_act"),
    ({**DRAFT, "draft_vocab_size": 65}, "draft_vocab_size 65 exceeds"),
    ({**DRAFT, "num_key_value_heads": 3}, "4 attention heads"),
    ({**DRAFT, "torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ({**DRAFT, "dflash_config": 3}, "dflash_config"),
    ({**SPECULATORS, "aux_hidden_state_layer_ids": [0, 2]}, "a tap of the embeddings"),
    (without(SPECULATORS, "aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids' is missing"),
    (without(SPECULATORS, "transformer_layer_config"), "transformer_layer_config' is missing"),
]


@pytest.mark.parametrize(("config", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_refused_by_name(config, message):
    with pytest.raises(CheckpointError, match=message):
        parse_draft_config(config)


def test_neutral_values_are_accepted():
    parse_draft_config({**DRAFT, "output_multiplier": 1.0, "markov_rank": 0, "mask_hidden": None})
    parse_draft_config(with_dflash(sample_from_anchor=False, use_aux_hidden_state=True))
