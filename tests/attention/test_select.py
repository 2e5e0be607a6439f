# SPDX-License-Identifier: Apache-2.0
"""Which backend serves which spec, by declared capability: no device, no package needed."""

import itertools
from dataclasses import replace

import pytest
import torch

from dflash import log
from dflash.attention import flash_attn, flashinfer, native, sdpa, select
from dflash.attention.select import choose_backend, select_backend
from dflash.attention.spec import Refusal, Support
from tests.attention.batches import SPEC

CPU = torch.device("cpu")
BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ARCHES = ("cpu", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120")
ROWS = [
    replace(
        SPEC, arch=arch, head_dim=head_dim, dtype=dtype, kv_dtype=FP8 if fp8 else dtype,
        causal=causal, window=window, has_sinks=sinks, num_heads=ratio, num_kv_heads=1,
        query_shape=shape, kv_block_size=page,
    )
    for arch, head_dim, dtype, fp8, causal, window, sinks, ratio, shape, page in itertools.product(
        ARCHES, (64, 72, 96, 128, 256), (BF16, FP16, FP32), (False, True), (False, True),
        (None, 128), (False, True), (1, 7), ("ragged", "uniform", "one"), (1, 16),
    )
]  # fmt: skip


@pytest.fixture
def everything_installed(monkeypatch):
    rows = tuple(replace(backend, missing=lambda: None) for backend in select.BACKENDS)
    monkeypatch.setattr(select, "BACKENDS", rows)


def _table(spec):
    """The same table as design section 6 has it, row by row: what serves, and what may be replayed."""
    half, gpu = spec.dtype in (BF16, FP16), spec.arch != "cpu"
    plain = spec.kv_dtype == spec.dtype and not spec.has_sinks
    prefill = gpu and half and plain and spec.head_dim in (64, 128, 256)
    prefill = prefill and (spec.window is None or spec.causal)
    ours = spec.arch in ("cpu", "sm_90", "sm_100", "sm_103")
    return {
        "native": (ours and spec.head_dim in (64, 96, 128, 256), True),
        "flash_attn": (spec.arch == "sm_90" and half and plain, True),
        "flashinfer": (prefill, True),
        "sdpa": (plain, False),
        "flashinfer_split": (prefill, False),
        "flashinfer_fa3": (prefill and spec.arch == "sm_90", False),
    }


def test_every_row(everything_installed):
    for spec in ROWS:
        table, answers = _table(spec), select.all_answers(spec)
        assert list(answers) == list(table)
        for name, (serves, replayable) in table.items():
            answer = answers[name]
            assert isinstance(answer, Support) == serves, (spec, name, answer)
            if isinstance(answer, Refusal):
                assert answer.reason
            else:
                assert (answer.replayable, answer.in_one_graph) == (replayable, replayable)
                assert bool(answer.reason) != replayable


def test_auto_takes_the_first_that_serves(everything_installed):
    automatic = ("native", "flash_attn", "flashinfer", "sdpa")
    for spec in ROWS:
        able = [name for name in automatic if _table(spec)[name][0]]
        if able:
            assert choose_backend(spec).backend.name == able[0]
        else:
            with pytest.raises(ValueError, match="no attention backend serves"):
                choose_backend(spec)


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({"arch": "sm_90"}, "native"),
        ({"arch": "sm_100"}, "native"),
        ({"arch": "sm_90", "head_dim": 72}, "flash_attn"),
        ({"arch": "sm_100", "head_dim": 72}, "sdpa"),
        ({"arch": "sm_120"}, "flashinfer"),
        ({"arch": "sm_120", "window": 64}, "sdpa"),
        ({"arch": "sm_120", "window": 64, "causal": True}, "flashinfer"),
    ],
)
def test_known_rows(everything_installed, change, chosen):
    spec = replace(SPEC, dtype=BF16, kv_dtype=BF16, **change)
    assert choose_backend(spec).backend.name == chosen


def test_a_package_that_is_absent_is_a_reason(monkeypatch):
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)
    spec = replace(SPEC, arch="sm_90", dtype=BF16, kv_dtype=BF16)
    answers = choose_backend(spec).answers
    assert answers["flashinfer"] == Refusal("flashinfer-python (>= 0.6.13) is not installed")
    assert "flash_attn_interface" in answers["flash_attn"].reason
    with pytest.raises(ValueError, match=r"flashinfer_fa3: flashinfer-python .* not installed"):
        choose_backend(spec, "flashinfer_fa3")


@pytest.mark.parametrize(
    ("version", "nvcc", "reason"),
    [
        ("0.6.12", True, "flashinfer-python 0.6.12 is older than 0.6.13"),
        ("0.6.13.post1", True, None),
        ("0.7.0", True, None),
        ("0.6.14", False, "there is no nvcc"),
    ],
)
def test_flashinfer_is_checked_without_an_import(monkeypatch, version, nvcc, reason):
    monkeypatch.setattr(
        flashinfer.importlib.util, "find_spec", lambda name: name == "flashinfer" or None
    )
    monkeypatch.setattr(flashinfer.metadata, "version", lambda _: version)
    monkeypatch.setattr(flashinfer, "_has_nvcc", lambda: nvcc)
    missing = flashinfer.missing()
    assert missing is None if reason is None else reason in missing


def test_an_explicit_choice_that_cannot_serve_names_every_reason():
    spec = replace(SPEC, arch="cpu", head_dim=72, has_sinks=True, window=8)
    with pytest.raises(ValueError, match="no attention backend serves") as error:
        choose_backend(spec, "flashinfer")
    for reason in ("no kernel for cpu", "float32", "head_dim 72", "sinks", "non-causal window"):
        assert reason in str(error.value)


def test_auto_takes_native_for_every_causality_and_window():
    for causal in (False, True):
        for window in (None, 128):
            spec = replace(SPEC, causal=causal, window=window)
            choice, backend = select_backend(spec, "auto", CPU)
            assert choice.backend.name == "native" and isinstance(backend, native.NativeAttention)


def test_windows_become_left_and_right_bounds():
    assert (SPEC.window_left, SPEC.window_right) == (-1, -1)
    symmetric = replace(SPEC, window=128)
    assert (symmetric.window_left, symmetric.window_right) == (127, 127)
    causal = replace(SPEC, window=128, causal=True)
    assert (causal.window_left, causal.window_right) == (127, -1)


def test_auto_falls_to_the_next_backend_and_a_named_one_is_an_error():
    odd = replace(SPEC, head_dim=72)
    assert isinstance(native.supports(odd), Refusal)
    assert choose_backend(odd).backend.name == "sdpa"
    with pytest.raises(ValueError, match=r"native: head_dim 72 is not one of"):
        choose_backend(odd, "native")


def test_what_was_passed_over_and_what_runs_eagerly_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(log, "_seen", set())
    select_backend(SPEC, "auto", CPU)
    assert not caplog.messages
    for _ in range(2):
        select_backend(replace(SPEC, head_dim=72), "auto", CPU)
    passed_over, eager = caplog.messages
    assert passed_over.startswith("attention runs on sdpa; passed over: native: head_dim 72 is not")
    assert eager == "attention backend sdpa runs eagerly: it reads the lengths on the host"


def test_sdpa_is_not_replayable_and_refuses_sinks():
    answer = sdpa.supports(SPEC)
    assert isinstance(answer, Support) and not (answer.replayable or answer.in_one_graph)
    with pytest.raises(ValueError, match="sdpa: attention sinks"):
        choose_backend(replace(SPEC, has_sinks=True), "sdpa")


def test_flash_attn_is_for_hopper():
    spec = replace(SPEC, arch="sm_100", dtype=BF16, kv_dtype=BF16)
    assert flash_attn.supports(spec) == Refusal("FlashAttention 3 is for sm_90, not sm_100")


def test_unknown_backend_is_named():
    with pytest.raises(ValueError, match="'fast' is unknown: expected auto, native, flash_attn"):
        choose_backend(SPEC, "fast")


def test_strict_asks_for_a_backend_whose_splits_do_not_follow_the_batch():
    for backend in select.BACKENDS:
        answer = backend.supports(replace(SPEC, batch_invariant=True))
        assert isinstance(answer, Refusal) == (backend.name != "native"), backend.name
