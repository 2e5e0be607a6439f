# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.linear import linear, linear_reference

from .support import DEVICES, DTYPES, assert_close, check_op, guarded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,outputs,size", [(1, 1, 1), (3, 7, 17), (8, 960, 576), (33, 65, 1536)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_reference(device, dtype, rows, outputs, size, has_bias):
    x = torch.randn(rows, size, dtype=dtype, device=device)
    weight = torch.randn(outputs, size, dtype=dtype, device=device)
    bias = torch.randn(outputs, dtype=dtype, device=device) if has_bias else None
    output, check_guards = guarded((rows, outputs), dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    linear(x, weight, bias, output)
    check_guards()
    assert_close(output, linear_reference(x, weight, bias))


def test_a_row_does_not_depend_on_the_others():
    x, weight = torch.randn(32, 100), torch.randn(77, 100)
    alone = torch.cat([linear(row[None], weight) for row in x])
    for rows in (2, 5, 8, 31, 32):
        assert torch.equal(linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("device", DEVICES)
def test_linear_strided_and_empty(device):
    wide, weight = torch.randn(5, 100, device=device), torch.randn(9, 30, device=device)
    assert_close(linear(wide[:, 10:40], weight), linear_reference(wide[:, 10:40], weight))
    assert linear(torch.empty(0, 30, device=device), weight).shape == (0, 9)


def test_linear_refuses_bad_input():
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[\*, 8\], got \[4, 9\]"):
        linear(torch.zeros(2, 8), torch.zeros(4, 9))
    with pytest.raises(RuntimeError, match=r"bias: expected shape \[4\], got \[5\]"):
        linear(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(5))


def test_linear_opcheck():
    arguments = (torch.randn(3, 16), torch.randn(5, 16), torch.randn(5), torch.empty(3, 5))
    check_op(torch.ops.dflash.linear.default, arguments)
