# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.linear import linear, linear_plan
from dflash.ops.linear_silu_mul import linear_silu_mul, linear_silu_mul_reference
from dflash.ops.silu_mul import silu_mul

from .support import DEVICES, DTYPES, assert_close, check_op, guarded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,outputs,size",
    [(1, 1, 1), (3, 7, 17), (8, 1536, 576), (33, 65, 136), (129, 40, 64), (250, 12288, 72)],
)
def test_linear_silu_mul_equals_reference(device, dtype, rows, outputs, size):
    x = torch.randn(rows, size, dtype=dtype, device=device)
    weight = torch.randn(2 * outputs, size, dtype=dtype, device=device) * size**-0.5
    output, check_guards = guarded((rows, outputs), dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    linear_silu_mul(x, weight, output)
    check_guards()
    assert_close(output, linear_silu_mul_reference(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_kernel_has_the_bits_of_two(dtype):
    for rows in (1, 5, 16, 33, 128):
        x = torch.randn(rows, 192, dtype=dtype, device="cuda")
        weight = torch.randn(2 * 72, 192, dtype=dtype, device="cuda")
        assert linear_plan(x, weight) is not None
        assert torch.equal(linear_silu_mul(x, weight), silu_mul(linear(x, weight)))


@pytest.mark.parametrize("device", DEVICES)
def test_linear_silu_mul_strided_and_empty(device):
    wide, weight = torch.randn(5, 100, device=device), torch.randn(18, 30, device=device)
    x = wide[:, 10:40]
    assert_close(linear_silu_mul(x, weight), linear_silu_mul_reference(x, weight))
    assert linear_silu_mul(torch.empty(0, 30, device=device), weight).shape == (0, 9)


def test_linear_silu_mul_refuses_bad_input():
    with pytest.raises(RuntimeError, match=r"weight: the number of rows must be even, got 3"):
        linear_silu_mul(torch.zeros(2, 8), torch.zeros(3, 8))
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[\*, 8\], got \[4, 9\]"):
        linear_silu_mul(torch.zeros(2, 8), torch.zeros(4, 9))
    with pytest.raises(RuntimeError, match=r"output: expected shape \[2, 2\], got \[2, 4\]"):
        linear_silu_mul(torch.zeros(2, 8), torch.zeros(4, 8), torch.zeros(2, 4))


def test_linear_silu_mul_opcheck():
    arguments = (torch.randn(3, 16), torch.randn(10, 16), torch.empty(3, 5))
    check_op(torch.ops.dflash.linear_silu_mul.default, arguments)
