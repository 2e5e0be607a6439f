# SPDX-License-Identifier: Apache-2.0
import importlib.util
from pathlib import Path

import pytest
import torch

import dflash  # noqa: F401 - registers the ops

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_ops", ROOT / "docs" / "generate_ops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ops_md_is_up_to_date(generator):
    expected = generator.render(generator.REGISTRATION.read_text())
    assert generator.OUTPUT.read_text() == expected, "docs/ops.md is stale: run `make docs`"


def test_every_registered_op_is_documented(generator):
    _, ops = generator.read_registration(generator.REGISTRATION.read_text())
    registered = {
        name.removeprefix("dflash::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dflash::")
    }
    assert registered == {op.name for op in ops}
    assert all(op.meaning for op in ops)
