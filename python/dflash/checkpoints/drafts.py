# SPDX-License-Identifier: Apache-2.0
"""A drafter's config.json, in the authors' or the speculators dialect, as a DraftConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.checkpoints.config import DraftConfig, LayerAttention
from dflash.checkpoints.fields import (
    read_architecture,
    read_bool,
    read_dict,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_layer_types,
    refuse,
)
from dflash.checkpoints.rope import parse_rope
from dflash.checkpoints.targets import SUPPORTED_TARGETS, read_decoder, read_head_dim
from dflash.errors import CheckpointError

SUPPORTED_DRAFTERS = ("DFlashDraftModel",)

_DFLASH_KEYS = (
    "attention_sink_bias",
    "attention_value_scale",
    "block_size",
    "causal",
    "input_embedding_scale",
    "layer_ids",
    "logit_scale",
    "mask_token_id",
    "num_target_layers",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "swa_window_size",
    "target_hidden_size",
    "target_layer_ids",
    "use_aux_hidden_state",
    "use_swa",
)
_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

# What other drafters of the family add; their checkpoints would load here and draft badly.
_OTHER_METHODS = {
    "DFlash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "DSpark": ("markov_rank", "markov_head_type", "enable_confidence_head", "dspark_block_size"),
    "Domino": ("projector_type", "pure_draft_prefix_len", "shift_label", "gru_hidden_dim"),
}
_UNBUILT_KEYS = ("final_logit_softcapping", "output_multiplier", "mask_hidden", "mlp_bias")


def parse_draft_config(config: Mapping) -> DraftConfig:
    """Reads a drafter's configuration, whichever dialect it is in.

    Raises:
        CheckpointError: another method's checkpoint, or what dflash cannot serve, named.
    """
    speculators = "speculators_config" in config or "speculators_model_type" in config
    _refuse_others(config, speculators)
    flat = _flatten_speculators(config) if speculators else dict(config)
    dflash = {**read_dict(flat, "eagle_config"), **read_dict(flat, "dflash_config")}
    _refuse_unbuilt(flat, dflash)

    head_dim = read_head_dim(flat, is_qwen3=flat.get("model_type") == "qwen3")
    attention_bias = bool(read_bool(flat, "attention_bias", False))
    is_neox = bool(read_bool(flat, "is_neox_style", True))
    decoder = read_decoder(
        flat,
        head_dim=head_dim,
        rope=parse_rope(flat, head_dim, default_theta=None, is_neox=is_neox),
        qk_norm=True,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        layers=_layers(flat, dflash),
    )
    draft_vocab_size = read_int(flat, "draft_vocab_size", None)
    if draft_vocab_size is not None and draft_vocab_size > decoder.vocab_size:
        raise CheckpointError(
            f"draft_vocab_size {draft_vocab_size} exceeds vocab_size {decoder.vocab_size}"
        )
    both = {**flat, **dflash}
    sinks = read_bool(dflash, "attention_sink_bias", None)
    if sinks is None:
        sinks = read_bool(flat, "add_swa_attention_sink_bias", False)
    return DraftConfig(
        dialect="speculators" if speculators else "dflash",
        decoder=decoder,
        target_layer_ids=_distinct(_target_layer_ids(flat, dflash)),
        target_hidden_size=read_int(both, "target_hidden_size", decoder.hidden_size),
        num_target_layers=read_int(both, "num_target_layers", None),
        mask_token_id=_mask_token_id(flat, dflash),
        draft_block_size=_draft_block_size(flat, dflash),
        draft_vocab_size=None if draft_vocab_size == decoder.vocab_size else draft_vocab_size,
        logit_scale=read_float(both, "logit_scale", 1.0),
        embedding_scale=read_float(both, "input_embedding_scale", 1.0),
        value_scale=read_float(both, "attention_value_scale", 1.0),
        has_sinks=bool(sinks),
        dtype=read_dtype(flat),
    )


def _refuse_others(config: Mapping, speculators: bool) -> None:
    architecture = read_architecture(config)
    method = str(config.get("speculators_model_type") or "")
    supported = f"supported: {', '.join(SUPPORTED_DRAFTERS)} (authors' and speculators format)"
    for other in ("DFlash2", "DSpark"):
        if other.lower() in f"{architecture} {method}".lower():
            raise CheckpointError(
                f"{architecture or method} is a {other} drafter, which is not built yet: loaded as "
                f"plain DFlash it would draft badly; {supported}"
            )
    if "open_spec_config_version" in config:
        raise CheckpointError(
            f"the Open Spec Config format (open_spec_config_version) is not supported; {supported}"
        )
    if method and method != "dflash":
        raise CheckpointError(f"speculators model type '{method}' is not supported; {supported}")
    if architecture in SUPPORTED_TARGETS and not speculators:
        raise CheckpointError(
            f"{architecture} is a target, not a drafter: give it as the model, or with draft_method "
            f'"autoregressive" to draft token by token; {supported}'
        )
    known = (*SUPPORTED_DRAFTERS, "DFlashSpeculator", "") if speculators else SUPPORTED_DRAFTERS
    if architecture not in known:
        shown = (
            f"drafter architecture '{architecture}'" if architecture else "no 'architectures' key"
        )
        raise CheckpointError(f"{shown}: not supported; {supported}")


def _flatten_speculators(config: Mapping) -> dict[str, Any]:
    """Brings the layer settings to the top and shifts the tap ids back to 'output of layer i'."""
    layer_config = read_dict(config, "transformer_layer_config")
    if not layer_config:
        raise CheckpointError("config key 'transformer_layer_config' is missing")
    outer = {key: value for key, value in config.items() if value is not None}
    outer.pop("model_type", None)
    flat = {**layer_config, **outer}
    dflash = dict(read_dict(config, "dflash_config"))
    if "target_layer_ids" not in dflash:
        taps = read_ids(config, "aux_hidden_state_layer_ids")
        if taps is None:
            raise CheckpointError("config key 'aux_hidden_state_layer_ids' is missing")
        dflash["target_layer_ids"] = _shift_back(taps, "aux_hidden_state_layer_ids")
    flat["dflash_config"] = dflash
    return flat


def _refuse_unbuilt(flat: Mapping, dflash: Mapping) -> None:
    for method, keys in _OTHER_METHODS.items():
        for config in (flat, dflash):
            refuse(config, keys, f"it belongs to a {method} drafter, which is not built")
    for config in (flat, dflash):
        refuse(config, _UNBUILT_KEYS, "not built")
        refuse(config, ("sample_from_anchor",), "only mask tokens are sampled")
        if read_bool(config, "use_aux_hidden_state", True) is False:
            raise CheckpointError(
                "config key 'use_aux_hidden_state' = False is not supported: taps are needed"
            )
    if flat.get("quantization_config"):
        raise CheckpointError("a quantized drafter (quantization_config) is not supported")
    if read_bool(flat, "use_qk_norm", True) is False:
        raise CheckpointError("config key 'use_qk_norm' = False is not supported")
    unknown = sorted(set(dflash) - set(_DFLASH_KEYS))
    if unknown:
        raise CheckpointError(
            f"unknown dflash_config key '{', '.join(unknown)}': it may change what the drafter "
            f"computes; known keys: {', '.join(_DFLASH_KEYS)}"
        )


def _layers(flat: Mapping, dflash: Mapping) -> tuple[LayerAttention, ...]:
    num_layers = read_int(flat, "num_hidden_layers")
    types = read_layer_types(flat, num_layers) or ("full_attention",) * num_layers
    override = read_bool(flat, "is_causal", None)
    if override is None:
        override = read_bool(dflash, "causal", None)
    use_swa = bool(read_bool({**flat, **dflash}, "use_swa", False))
    non_causal = bool(read_bool({**flat, **dflash}, "sliding_window_non_causal", False))
    layers = []
    for kind in types:
        slides = kind == "sliding_attention"
        causal = override if override is not None else slides and not non_causal
        layers.append(LayerAttention(causal, _window(flat, dflash) if slides or use_swa else None))
    return tuple(layers)


def _window(flat: Mapping, dflash: Mapping) -> int:
    window = read_int(dflash, "swa_window_size", read_int(flat, "swa_window_size", None))
    if window is None and read_bool(flat, "use_sliding_window", None) is not False:
        window = read_int(flat, "sliding_window", None)
    if window is None:
        raise CheckpointError(
            "sliding-window layers need a window: expected dflash_config.swa_window_size, or "
            "sliding_window (and use_sliding_window not false)"
        )
    return window


def _target_layer_ids(flat: Mapping, dflash: Mapping) -> tuple[int, ...]:
    for config in (dflash, flat):
        taps = read_ids(config, "target_layer_ids")
        if taps is not None:
            return taps
    for config in (dflash, flat):
        taps = read_ids(config, "layer_ids")
        if taps is not None:
            return _shift_back(taps, "layer_ids")
    raise CheckpointError("config key 'dflash_config.target_layer_ids' is missing")


def _distinct(taps: tuple[int, ...]) -> tuple[int, ...]:
    """A layer fills one column of the taps, so a second column for it would stay zero."""
    twice = sorted({tap for tap in taps if taps.count(tap) > 1})
    if twice:
        raise CheckpointError(
            f"config key 'target_layer_ids' names layers {twice} more than once (of {list(taps)}, "
            "outputs counted from 0): expected every layer once"
        )
    return taps


def _shift_back(taps: tuple[int, ...], key: str) -> tuple[int, ...]:
    """Ids of 'the input of layer i' become ids of 'the output of layer i - 1'."""
    if min(taps) < 1:
        raise CheckpointError(f"config key '{key}' names 0, a tap of the embeddings: not supported")
    return tuple(tap - 1 for tap in taps)


def _mask_token_id(flat: Mapping, dflash: Mapping) -> int:
    for config, key in ((dflash, "mask_token_id"), *((flat, key) for key in _MASK_KEYS)):
        token = read_int(config, key, None, minimum=0)
        if token is not None:
            return token
    raise CheckpointError(
        "the mask token is missing: expected dflash_config.mask_token_id or one of "
        f"{', '.join(_MASK_KEYS)}"
    )


def _draft_block_size(flat: Mapping, dflash: Mapping) -> int:
    sizes = [read_int(config, "block_size", None, minimum=2) for config in (flat, dflash)]
    given = {size for size in sizes if size is not None}
    if len(given) > 1:
        raise CheckpointError(
            f"block_size is {sizes[0]} at the top level but {sizes[1]} in dflash_config"
        )
    if not given:
        raise CheckpointError("config key 'block_size' is missing (top level or dflash_config)")
    return given.pop()
