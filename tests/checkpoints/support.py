# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints made on the fly, in the layouts of the real ones."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

DRAFT = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "num_target_layers": 3,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]},
}

SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.4.0",
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "x"}},
    "transformer_layer_config": {
        key: value
        for key, value in {**TARGET, "num_hidden_layers": 2}.items()
        if key not in ("architectures", "torch_dtype", "eos_token_id")
    },
    "draft_vocab_size": 64,
    "block_size": 4,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [1, 3],
    "dtype": "bfloat16",
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def with_dflash(**keys):
    return {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], **keys}}


def decoder_tensors(config, prefix="", sinks=False):
    """Random weights of every layer, under the stored names."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    arch = config["architectures"][0]
    qk_norm = arch not in ("LlamaForCausalLM", "Qwen2ForCausalLM")
    bias = config.get("attention_bias", False)
    shapes = {"norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{layer}self_attn.q_proj.weight": (q, hidden),
            f"{layer}self_attn.k_proj.weight": (kv, hidden),
            f"{layer}self_attn.v_proj.weight": (kv, hidden),
            f"{layer}self_attn.o_proj.weight": (hidden, q),
            f"{layer}mlp.gate_proj.weight": (inner, hidden),
            f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }
        if qk_norm:
            shapes |= {f"{layer}self_attn.{n}_norm.weight": (head,) for n in "qk"}
        if bias or arch == "Qwen2ForCausalLM":
            sizes = {"q": q, "k": kv, "v": kv}
            shapes |= {f"{layer}self_attn.{n}_proj.bias": (sizes[n],) for n in "qkv"}
        if bias and arch != "Qwen2ForCausalLM":
            shapes[f"{layer}self_attn.o_proj.bias"] = (hidden,)
        if sinks:
            shapes[f"{layer}self_attn.attention_sink_bias"] = (config["num_attention_heads"],)
    return {prefix + name: _random(shape) for name, shape in shapes.items()}


def target_tensors(config):
    tensors = decoder_tensors(config, "model.")
    tensors["model.embed_tokens.weight"] = _random((config["vocab_size"], config["hidden_size"]))
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _random((config["vocab_size"], config["hidden_size"]))
    return tensors


def draft_tensors(config, num_taps=2, target_hidden=32, sinks=False):
    inner = config.get("transformer_layer_config", config)
    inner = {**inner, "architectures": ["DFlashDraftModel"]}
    hidden = inner["hidden_size"]
    return decoder_tensors(inner, sinks=sinks) | {
        "fc.weight": _random((hidden, num_taps * target_hidden)),
        "hidden_norm.weight": _random((hidden,)),
    }


def write(folder: Path, config, tensors, shards=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        part = dict(list(tensors.items())[i::shards])
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _random(shape):
    return torch.randn(shape).to(torch.bfloat16)
