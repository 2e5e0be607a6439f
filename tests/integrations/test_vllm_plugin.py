# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin without vLLM: files whose source is or is not the one known."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dflash import _library
from dflash.integrations import vllm as plugin
from dflash.integrations.vllm.known import PARTS, Part, Version
from dflash.integrations.vllm.sources import source_hash
from dflash.log import _seen

SOURCE = """\
import functools

class Model:
    @functools.cache
    def store(self):
        return 1

def other():
    return 2
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "model.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """A module whose `install` says that it ran, and whose `fail` raises."""
    calls = []
    module = ModuleType("peer_install")
    module.install = lambda: calls.append("install")
    module.fail = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "peer_install", module)
    return calls


def part(root, install="peer_install:install", version="1.0"):
    names = ["peer.model:Model.store", "peer.model:other"]
    return Part("the part", {version: Version(install, {n: source_hash(root, n) for n in names})})


def test_a_hash_covers_a_definition_with_its_decorators_and_nothing_else(root):
    hashes = [source_hash(root, f"peer.model:{n}") for n in ("Model.store", "other", "Model")]
    file = root / "peer" / "model.py"
    file.write_text("X = 1\n" + SOURCE.replace("return 2", "return 3"))
    assert source_hash(root, "peer.model:Model.store") == hashes[0]
    assert source_hash(root, "peer.model:other") != hashes[1]
    file.write_text(SOURCE.replace("    @functools.cache\n", ""))
    assert source_hash(root, "peer.model:Model.store") != hashes[0]
    assert source_hash(root, "peer.model:absent") is None
    assert source_hash(root, "peer.nowhere:other") is None


def test_a_part_is_taken_over_only_where_every_source_is_known(root, installed):
    known = part(root)
    assert plugin.install(root, "1.0", [known]) == (["the part"], [])
    assert installed == ["install"]
    (root / "peer" / "model.py").write_text(SOURCE.replace("return 2", "return 3"))
    taken, left = plugin.install(root, "1.0", [known])
    assert (taken, left) == ([], ["the part: not the source we know: peer.model:other"])
    taken, left = plugin.install(root, "1.1", [known])
    assert taken == [] and "vLLM 1.1 is not known, only 1.0" in left[0]
    decided = Part("the part", known.versions, left={"1.2": "slower"})
    assert plugin.install(root, "1.2", [decided]) == ([], ["the part: slower"])
    assert installed == ["install"]


def test_a_part_that_fails_to_install_is_left(root, installed):
    taken, left = plugin.install(root, "1.0", [part(root, "peer_install:fail"), part(root)])
    assert taken == ["the part"] and "ZeroDivisionError" in left[0]


def test_the_plugin_is_off_unless_asked_for(monkeypatch, root, installed, caplog):
    found = []

    def find():
        found.append(1)
        return root, "1.0"

    monkeypatch.setattr(plugin, "find_vllm", find)
    monkeypatch.setattr(plugin.install, "__defaults__", ([part(root)],))
    for value in (None, "0", ""):
        monkeypatch.delenv("DFLASH_VLLM", raising=False)
        if value is not None:
            monkeypatch.setenv("DFLASH_VLLM", value)
        plugin.register()
    assert found == installed == []
    monkeypatch.setenv("DFLASH_VLLM", "1")
    _seen.clear()
    with caplog.at_level(logging.WARNING, "dflash"):
        monkeypatch.setattr(_library, "cuda_library_error", "torch is a CPU build")
        plugin.register()
        assert "nothing taken over: torch is a CPU build" in caplog.text and installed == []
        monkeypatch.setattr(_library, "cuda_library_error", None)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        plugin.register()
        assert "nothing taken over: VLLM_BATCH_INVARIANT" in caplog.text and installed == []
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
        plugin.register()
        plugin.register()
    assert caplog.text.count("taken over: the part; left: Gumbel sampling") == 1


def test_vllm_starts_whatever_fails(monkeypatch, caplog):
    monkeypatch.setenv("DFLASH_VLLM", "1")
    monkeypatch.setattr(plugin, "find_vllm", lambda: 1 / 0)
    _seen.clear()
    with caplog.at_level(logging.WARNING, "dflash"):
        plugin.register()
    assert "nothing taken over: ZeroDivisionError" in caplog.text


def test_the_entry_point_and_the_parts_exist():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    entry = re.search(
        r'\[project.entry-points."vllm.general_plugins"\]\ndflash = "(.*):(.*)"', text
    )
    assert getattr(importlib.import_module(entry[1]), entry[2]) is plugin.register
    for known in PARTS:
        assert [*known.versions, *known.left] == ["0.26.0", "0.33.0"]
        for version in known.versions.values():
            module, _, function = version.install.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
            assert all(re.fullmatch(r"[0-9a-f]{16}", x) for x in version.functions.values())
