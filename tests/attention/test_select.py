# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from dflash import log
from dflash.attention import native, sdpa
from dflash.attention.select import select_backend
from dflash.attention.spec import AttentionSpec, Refusal, Support

SPEC = AttentionSpec(
    arch="cpu", num_heads=9, num_kv_heads=3, head_dim=64, dtype=torch.float32, kv_dtype=torch.float32,
    causal=False, window=None, query_shape="uniform", kv_block_size=16,
)  # fmt: skip


def test_auto_takes_native_for_every_causality_and_window():
    for causal in (False, True):
        for window in (None, 128):
            name, backend = select_backend(replace(SPEC, causal=causal, window=window))
            assert name == "native" and isinstance(backend, native.NativeAttention)


def test_windows_become_left_and_right_bounds():
    assert (SPEC.window_left, SPEC.window_right) == (-1, -1)
    symmetric = replace(SPEC, window=128)
    assert (symmetric.window_left, symmetric.window_right) == (127, 127)
    causal = replace(SPEC, window=128, causal=True)
    assert (causal.window_left, causal.window_right) == (127, -1)


def test_auto_falls_to_the_next_backend_and_a_named_one_is_an_error():
    odd = replace(SPEC, head_dim=72)
    assert isinstance(native.supports(odd), Refusal)
    assert select_backend(odd)[0] == "sdpa"
    with pytest.raises(ValueError, match=r"native: head_dim 72 is not one of"):
        select_backend(odd, "native")


def test_what_was_passed_over_and_what_runs_eagerly_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(log, "_seen", set())
    select_backend(SPEC)
    assert not caplog.messages
    for _ in range(2):
        select_backend(replace(SPEC, head_dim=72))
    passed_over, eager = caplog.messages
    assert passed_over.startswith("attention runs on sdpa; passed over: native: head_dim 72 is not")
    assert eager == "attention backend sdpa is not replayable: it runs eagerly"


def test_sdpa_is_not_replayable_and_refuses_sinks():
    assert sdpa.supports(SPEC) == Support(replayable=False, in_one_graph=False)
    with pytest.raises(ValueError, match="sdpa: attention sinks"):
        select_backend(replace(SPEC, has_sinks=True), "sdpa")


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'fast' is unknown: expected auto, native, sdpa"):
        select_backend(SPEC, "fast")
