# SPDX-License-Identifier: Apache-2.0
"""What the op tests share: devices, dtypes, guard bytes and one comparison."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def guarded(shape, dtype, device, pad=64):
    """A contiguous poisoned tensor inside a larger buffer, and a check that nothing around it was written."""
    count = 1
    for size in shape:
        count *= size
    poison = 77 if not dtype.is_floating_point else 12344.0
    buffer = torch.full((count + 2 * pad,), poison, dtype=dtype, device=device)
    expected = buffer[:pad].clone()

    def check():
        torch.testing.assert_close(buffer[:pad], expected, rtol=0, atol=0)
        torch.testing.assert_close(buffer[pad + count :], expected, rtol=0, atol=0)

    return buffer[pad : pad + count].view(shape), check


def to_device(device, arguments):
    """Keyword arguments with their tensors on the device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def assert_close(actual, expected, tolerance=None):
    """||actual - expected|| / ||expected|| within the dtype's tolerance; NaN never passes."""
    assert actual.shape == expected.shape, f"{actual.shape} != {expected.shape}"
    tolerance = tolerance or RELATIVE_ERROR[actual.dtype]
    a, e = actual.double().cpu(), expected.double().cpu()
    error = (a - e).norm() / e.norm().clamp_min(1e-12)
    assert error < tolerance, (
        f"relative error {error:.3e} >= {tolerance:.1e}, worst at {(a - e).abs().argmax()}"
    )


def copied(arguments):
    return tree_map_only(torch.Tensor, torch.clone, arguments)


def assert_same_tensors(actual, expected):
    """Bit by bit, in nested lists; what is no tensor is not compared."""
    pairs = zip(tree_leaves(actual), tree_leaves(expected), strict=True)
    for i, (a, e) in enumerate(pairs):
        if isinstance(e, torch.Tensor):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True, msg=f"argument {i}")


class Calls(torch.nn.Module):
    """A module for torch.export that calls an op."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, *arguments):
        return self.op(*arguments)


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def check_op(op, arguments, opchecks=OPCHECKS):
    """opcheck; and torch.compile(fullgraph=True) and torch.export write what the op itself writes."""
    torch.library.opcheck(op, arguments, test_utils=opchecks)
    expected = copied(arguments)
    op(*expected)
    compiled = copied(arguments)
    torch.compiler.reset()
    torch.compile(lambda *x: op(*x), fullgraph=True)(*compiled)
    assert_same_tensors(compiled, expected)
    exported = copied(arguments)
    program = torch.export.export(Calls(op), tuple(copied(arguments)))
    program.run_decompositions({}).module()(*exported)
    assert_same_tensors(exported, expected)
