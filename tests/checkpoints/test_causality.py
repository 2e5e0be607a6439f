# SPDX-License-Identifier: Apache-2.0
"""The truth table of section 6: which layer is causal, and which sees a window of which size."""

import itertools

import pytest
import torch

from dflash.attention import flashinfer
from dflash.attention.select import choose_backend
from dflash.attention.spec import Refusal
from dflash.checkpoints import LayerAttention, parse_draft_config
from dflash.errors import CheckpointError
from dflash.models.decoder import DecoderSettings, attention_specs
from tests.checkpoints.support import DRAFT, SPECULATORS

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = [None, [FULL, FULL], [SLIDING, SLIDING], [FULL, SLIDING]]
SWITCH = [None, False, True]


def _config(is_causal, causal, layer_types, use_swa, sliding_window, swa_window_size):
    """A drafter's config with only the keys that are not None."""
    top = {"is_causal": is_causal, "layer_types": layer_types, "sliding_window": sliding_window}
    inner = {"causal": causal, "use_swa": use_swa, "swa_window_size": swa_window_size}
    dflash = DRAFT["dflash_config"] | {k: v for k, v in inner.items() if v is not None}
    return DRAFT | {"dflash_config": dflash} | {k: v for k, v in top.items() if v is not None}


KEYS = ("is_causal", "causal", "layer_types", "use_swa", "sliding_window", "swa_window_size")
COMBINATIONS = list(itertools.product(SWITCH, SWITCH, LAYER_TYPES, SWITCH, [None, 16], [None, 24]))


@pytest.mark.parametrize(KEYS, COMBINATIONS)
def test_every_combination(
    is_causal, causal, layer_types, use_swa, sliding_window, swa_window_size
):
    config = _config(is_causal, causal, layer_types, use_swa, sliding_window, swa_window_size)
    window = swa_window_size or sliding_window
    kinds = layer_types or [FULL, FULL]
    slides = [bool(use_swa) or kind == SLIDING for kind in kinds]
    if any(slides) and window is None:
        with pytest.raises(CheckpointError, match="need a window"):
            parse_draft_config(config)
        return
    expected = []
    for kind, has_window in zip(kinds, slides, strict=True):
        by_type = kind == SLIDING
        flag = is_causal if is_causal is not None else causal if causal is not None else by_type
        expected.append(LayerAttention(flag, window if has_window else None))
    assert parse_draft_config(config).decoder.layers == tuple(expected)


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_100"])
def test_every_combination_reaches_the_backends(arch):
    """Each layer's bounds on the keys, from its config to the spec that a backend is chosen by."""
    settings = DecoderSettings(torch.device("cpu"), torch.bfloat16, torch.bfloat16, 16, 128)
    for combination in COMBINATIONS:
        config = _config(*combination)
        try:
            decoder = parse_draft_config({**config, "head_dim": 64}).decoder
        except CheckpointError:
            continue
        specs = attention_specs(decoder, settings, arch, [False] * decoder.num_layers)
        assert list(specs) == list(dict.fromkeys(decoder.layers))
        for layer, spec in specs.items():
            size = layer.window
            left = -1 if size is None else size - 1
            right = -1 if size is None or layer.causal else size - 1
            assert (spec.causal, spec.window_left, spec.window_right) == (layer.causal, left, right)
            assert choose_backend(spec).backend.name == "native"
            answer = flashinfer.supports(spec)
            refused = arch == "cpu" or (size is not None and not layer.causal)
            assert isinstance(answer, Refusal) == refused


# Written out by hand, so that the table above does not only repeat the code.
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [(False, None), (False, None)]),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 8}, [(False, None), (True, 8)]),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8, "is_causal": False}, [(False, 8)] * 2),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8, "causal": False}, [(False, 8)] * 2),
        ({"is_causal": False, "causal": True}, [(False, None)] * 2),
        ({"is_causal": True, "causal": False}, [(True, None)] * 2),
        ({"use_swa": True, "swa_window_size": 9}, [(False, 9)] * 2),
        ({"use_swa": True, "sliding_window": 8, "swa_window_size": 9}, [(False, 9)] * 2),
        ({"sliding_window": 8}, [(False, None)] * 2),
    ],
)
def test_known_rows(keys, expected):
    config = _config(*(keys.get(name) for name in KEYS))
    layers = parse_draft_config(config).decoder.layers
    assert [(layer.causal, layer.window) for layer in layers] == expected


@pytest.mark.parametrize(("flag", "causal"), [(None, True), (False, True), (True, False)])
def test_speculators_flag_is_for_sliding_layers_only(flag, causal):
    config = {**SPECULATORS, "sliding_window_non_causal": flag}
    config["transformer_layer_config"] = {
        **SPECULATORS["transformer_layer_config"],
        "layer_types": [FULL, SLIDING],
        "sliding_window": 8,
        "use_sliding_window": True,
    }
    layers = parse_draft_config(config).decoder.layers
    assert layers == (LayerAttention(False, None), LayerAttention(causal, 8))


def test_a_window_switched_off_is_no_window():
    config = {**DRAFT, "layer_types": [SLIDING, SLIDING], "sliding_window": 8}
    with pytest.raises(CheckpointError, match="use_sliding_window not false"):
        parse_draft_config({**config, "use_sliding_window": False})


@pytest.mark.parametrize("types", [[FULL], [FULL] * 3, [FULL, "linear_attention"], "full"])
def test_layer_types_that_do_not_fit(types):
    with pytest.raises(CheckpointError, match=r"layer.type"):
        parse_draft_config({**DRAFT, "layer_types": types})
