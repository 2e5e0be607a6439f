# SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export of the ops: each in its own test (support.check_op), and several in one function."""

from pathlib import Path

import torch

from dflash.ops.add_rms_norm import add_rms_norm
from dflash.ops.linear import linear
from dflash.ops.silu_mul import silu_mul

ASKS = {"linear_plan", "lm_head_sample_plan"}  # what would run: nothing to trace


def test_every_op_is_compiled_and_exported():
    registered = {
        name.removeprefix("dflash::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("dflash::")
    }
    folder = Path(__file__).parent
    for op in registered - ASKS:
        assert "check_op(" in (folder / f"test_{op}.py").read_text(), op


def mlp(x, residual, norm, gate_up, down, output):
    normed = add_rms_norm(x, residual, norm, 1e-6)
    return linear(silu_mul(linear(normed, gate_up)), down, output=output)


def mlp_arguments(rows):
    shapes = [(rows, 16), (rows, 16), (16,), (48, 16), (16, 24), (rows, 16)]
    return [torch.randn(shape) for shape in shapes]


def test_one_compiled_function_serves_any_number_of_rows():
    """The wrappers allocate inside, residual and output are written in place, rows stay symbolic."""
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (3, 7, 33):
            arguments = mlp_arguments(rows)
            expected = [argument.clone() for argument in arguments]
            mlp(*expected)
            compiled(*arguments)
            torch.testing.assert_close(arguments, expected)


def test_one_exported_program_serves_any_number_of_rows():
    class Mlp(torch.nn.Module):
        def forward(self, x, residual, norm, gate_up, down, output):
            return mlp(x, residual, norm, gate_up, down, output)

    rows = torch.export.Dim("rows", min=2)
    dynamic = [{0: rows}, {0: rows}, None, None, None, {0: rows}]
    program = torch.export.export(Mlp(), tuple(mlp_arguments(3)), dynamic_shapes=dynamic)
    arguments = mlp_arguments(19)
    expected = [argument.clone() for argument in arguments]
    mlp(*expected)
    program.module()(*arguments)
    torch.testing.assert_close(arguments, expected)
