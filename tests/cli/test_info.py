# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import pytest
import torch

from dflash import _conflict, devices
from dflash.attention.select import BACKENDS
from dflash.cli import backends, info, main
from tests.checkpoints.support import DRAFT, TARGET


def _run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dflash", "info", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    return capsys.readouterr().out


def test_info_says_what_is_here(monkeypatch, capsys):
    facts = json.loads(_run(monkeypatch, capsys, "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["libraries"]["libdflash_ops"].endswith("libdflash_ops.so")
    assert "cpu" in facts["devices"]
    text = _run(monkeypatch, capsys)
    assert all(section in text for section in ("versions", "devices", "libraries"))


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "dflash", "info", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["versions"]["torch"] == torch.__version__


@pytest.fixture
def pair(tmp_path):
    """Configurations alone: no weights are there to be read."""
    draft = {
        **DRAFT, "head_dim": 64, "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 16,
    }  # fmt: skip
    for name, config in (("target", {**TARGET, "head_dim": 64}), ("draft", draft)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return "--model", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")


def test_info_says_which_backend_each_layer_group_gets(monkeypatch, capsys, pair):
    plans = json.loads(_run(monkeypatch, capsys, *pair, "--device", "sm_90", "--json"))
    (target,), (full, sliding) = plans["target"], plans["draft"]
    assert (target["layers"], target["causal"], target["window"]) == ([0, 1, 2], True, None)
    assert (full["layers"], full["causal"], full["window"]) == ([0], False, None)
    assert (sliding["layers"], sliding["causal"], sliding["window"]) == ([1], True, 16)
    for group in (target, full, sliding):
        assert group["chosen"] == "native" and (group["num_heads"], group["num_kv_heads"]) == (4, 2)
        assert list(group["candidates"]) == [backend.name for backend in BACKENDS]
        assert group["candidates"]["native"] == "chosen: runs in one graph"
        assert "native comes first" in group["candidates"]["sdpa"]
        assert "flashinfer-python" in group["candidates"]["flashinfer"]
    text = _run(monkeypatch, capsys, *pair, "--device", "cpu")
    heading = "draft: layers 1, causal, window 16, 4 heads over 2 K/V heads of 64, float32 on cpu"
    assert f"{heading}: native" in text
    assert "no kernel for cpu" in text


def test_info_reads_a_small_model_as_drafter(monkeypatch, capsys, pair, tmp_path):
    pair = [
        "--device",
        "cpu",
        "--model",
        str(tmp_path / "target"),
        "--draft",
        str(tmp_path / "target"),
    ]
    plans = json.loads(
        _run(monkeypatch, capsys, "--json", *pair, "--draft-method", "autoregressive")
    )
    assert plans["draft"] == plans["target"] and plans["draft"][0]["causal"]
    with pytest.raises(ValueError, match="draft_method 'eagle': expected one of dflash, auto"):
        backends.plan_backends(None, str(tmp_path / "target"), "cpu", "eagle")


def test_info_names_what_it_cannot_read(monkeypatch, capsys, pair, tmp_path):
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**DRAFT, "layer_types": ["x"]}))
    monkeypatch.setattr(sys, "argv", ["dflash", "info", *pair])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert str(tmp_path / "draft") in capsys.readouterr().err


def test_info_says_why_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert info.gather()["unavailable"]["GPU"] == f"torch {torch.__version__} is a CPU build"


def test_an_old_driver_is_told_in_torchs_words(monkeypatch):
    def fail():
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found 11040). Please update"
        )

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    expected = "The NVIDIA driver on your system is too old (found 11040)"
    assert devices.why_no_cuda() == expected


def test_a_gpu_that_is_not_served_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices._library, "cuda_library_error", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    assert devices.why_no_cuda().startswith("no kernels for NVIDIA A100: this build serves sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 3))
    assert devices.why_no_cuda() is None


def test_conflict_by_metadata_and_by_sentinel(monkeypatch, tmp_path):
    assert _conflict.find_conflict() is None
    monkeypatch.setattr(_conflict, "PACKAGE_DIR", tmp_path)
    (tmp_path / _conflict.SENTINEL).touch()
    assert "separate environments" in _conflict.find_conflict()
    (tmp_path / _conflict.SENTINEL).unlink()
    monkeypatch.setattr(_conflict.metadata, "version", lambda _: "0.1.0")
    assert "dflash 0.1.0" in _conflict.find_conflict()
