# SPDX-License-Identifier: Apache-2.0
"""traps.toml is true: its tests exist and its mutations still apply."""

import ast
from pathlib import Path

import pytest

from tests.mutants import ROOT, load_traps, mutated

TRAPS = load_traps()
MUTATIONS = [mutation for trap in TRAPS for mutation in trap.mutations]

REQUIRED = {*range(1, 14), 15, *range(17, 22), *range(23, 27)}
"""Traps of DESIGN section 9 that concern ops, loading and the step."""


def _functions(path: Path) -> set[str]:
    """Test functions of a file, "Class::name" inside classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


def test_every_trap_of_this_stage_is_mapped():
    numbers = [trap.number for trap in TRAPS]
    assert len(numbers) == len(set(numbers))
    assert set(numbers) >= REQUIRED
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: str(trap.number))
def test_tests_exist(trap):
    tests = {*trap.tests, *(test for mutation in trap.mutations for test in mutation.tests)}
    assert trap.tests
    assert trap.mutations
    for test in tests:
        file, _, function = test.partition("::")
        function = function.partition("[")[0]
        assert function in _functions(ROOT / file), test


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutations_apply(mutation):
    assert mutated((ROOT / mutation.file).read_text(), mutation) != ""
    assert mutation.old != mutation.new
