# SPDX-License-Identifier: Apache-2.0
import importlib
import re
from pathlib import Path

import pytest
import torch

import dflash

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def load(monkeypatch):
    """A generator of docs/, by its name."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module


@pytest.mark.parametrize("name", ["generate_ops", "generate_header"])
def test_generated_files_are_up_to_date(load, name):
    generator = load(name)
    expected = generator.render(generator.REGISTRATION.read_text())
    assert generator.OUTPUT.read_text() == expected, f"{generator.OUTPUT} is stale: run `make docs`"


def test_every_registered_op_is_documented(load):
    generator = load("generate_ops")
    _, ops = generator.read_registration(generator.REGISTRATION.read_text())
    registered = {
        name.removeprefix("dflash::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dflash::")
    }
    assert registered == {op.name for op in ops}
    assert all(op.meaning for op in ops)


def test_the_header_has_every_op(load):
    """The dispatcher compares each declaration with its schema when it is first called: examples/cpp."""
    ops, header = load("generate_ops"), load("generate_header")
    _, schemas = ops.read_registration(ops.REGISTRATION.read_text())
    text = header.OUTPUT.read_text()
    for op in schemas:
        assert re.search(rf'call<{op.name}>\(\s*"dflash::{op.name}"', text)


def test_the_version_is_one_everywhere():
    cmake = re.search(r"project\(dflash VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    package = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert cmake[1] == package[1] == dflash.__version__
