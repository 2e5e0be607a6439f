# SPDX-License-Identifier: Apache-2.0
"""A target's config.json as a TargetConfig. Keys, defaults and window rules are transformers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.checkpoints.config import DecoderConfig, LayerAttention, TargetConfig
from dflash.checkpoints.fields import (
    read_architecture,
    read_bool,
    read_dtype,
    read_eos_ids,
    read_float,
    read_int,
    read_layer_types,
    refuse,
)
from dflash.checkpoints.rope import parse_rope
from dflash.errors import CheckpointError

SUPPORTED_TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def parse_target_config(config: Mapping, generation_config: Mapping | None = None) -> TargetConfig:
    """Reads a target's configuration.

    Args:
        config: config.json.
        generation_config: generation_config.json; its eos ids join the config's.

    Raises:
        CheckpointError: an architecture, key or value that dflash cannot serve, named.
    """
    architecture = read_architecture(config)
    if architecture not in SUPPORTED_TARGETS:
        raise CheckpointError(_refusal(architecture))
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise CheckpointError(
            f"quantized weights (quantization_config, method '{method}') are not supported: "
            "use the float checkpoint"
        )
    refuse(config, ("mlp_bias",), "biases in the MLP are not built")

    is_qwen3 = architecture == "Qwen3ForCausalLM"
    attention_bias = bool(read_bool(config, "attention_bias", False))
    head_dim = read_head_dim(config, is_qwen3)
    decoder = read_decoder(
        config,
        head_dim=head_dim,
        rope=parse_rope(config, head_dim, default_theta=10000.0),
        qk_norm=is_qwen3,
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        layers=_layers(config, architecture),
    )
    eos = read_eos_ids(config) + read_eos_ids(generation_config or {})
    return TargetConfig(
        architecture=architecture,
        decoder=decoder,
        tie_word_embeddings=bool(read_bool(config, "tie_word_embeddings", False)),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dtype=read_dtype(config),
    )


def read_decoder(config: Mapping, **fields: Any) -> DecoderConfig:
    """The part of a DecoderConfig that targets and drafters spell alike; `fields` are the rest."""
    hidden_act = config.get("hidden_act", "silu")
    if hidden_act not in ("silu", "swish"):
        raise CheckpointError(f"config key 'hidden_act' must be silu, got {hidden_act!r}")
    num_heads = read_int(config, "num_attention_heads")
    num_kv_heads = read_int(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{num_heads} attention heads are not a multiple of {num_kv_heads} key/value heads"
        )
    return DecoderConfig(
        hidden_size=read_int(config, "hidden_size"),
        intermediate_size=read_int(config, "intermediate_size"),
        num_layers=read_int(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=read_int(config, "vocab_size"),
        rms_norm_eps=read_float(config, "rms_norm_eps"),
        max_position_embeddings=read_int(config, "max_position_embeddings"),
        **fields,
    )


def read_head_dim(config: Mapping, is_qwen3: bool) -> int:
    """`head_dim`; absent, 128 for Qwen3, hidden_size / num_attention_heads for the others."""
    hidden_size = read_int(config, "hidden_size")
    num_heads = read_int(config, "num_attention_heads")
    if "head_dim" not in config and is_qwen3:
        return 128
    head_dim = read_int(config, "head_dim", None)
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config key 'head_dim' is missing, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    return hidden_size // num_heads


def _layers(config: Mapping, architecture: str) -> tuple[LayerAttention, ...]:
    num_layers = read_int(config, "num_hidden_layers")
    types = read_layer_types(config, num_layers)
    use_window = bool(read_bool(config, "use_sliding_window", False))
    window = read_int(config, "sliding_window", None)
    if architecture == "LlamaForCausalLM" and (use_window or "sliding_attention" in (types or ())):
        raise CheckpointError("LlamaForCausalLM with sliding-window layers is not supported")
    if types is None:
        first = read_int(config, "max_window_layers", 28, minimum=0)
        sliding = [use_window and window is not None and i >= first for i in range(num_layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and not (use_window and window):
        raise CheckpointError(
            "layer_types names sliding_attention layers, but use_sliding_window is "
            f"{str(use_window).lower()} and sliding_window is {window}: expected true and a window"
        )
    return tuple(LayerAttention(True, window if slides else None) for slides in sliding)


def _refusal(architecture: str) -> str:
    supported = f"supported targets: {', '.join(SUPPORTED_TARGETS)} (dense)"
    if not architecture:
        return f"config.json has no 'architectures'; {supported}"
    if "DFlash" in architecture or "DSpark" in architecture:
        return (
            f"{architecture} is a drafter: give it as the draft, not the model, with draft_method "
            f'"dflash"; {supported}'
        )
    return f"target architecture {architecture} is not supported; {supported}"
