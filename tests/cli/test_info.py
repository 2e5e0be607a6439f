# SPDX-License-Identifier: Apache-2.0
import json
import sys

import pytest
import torch

from dflash import _conflict, devices
from dflash.cli import info, main


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
