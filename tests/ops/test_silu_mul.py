# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.silu_mul import silu_mul, silu_mul_reference

from .support import DEVICES, DTYPES, assert_close, check_op, guarded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", [(1, 8), (3, 17), (16, 1536), (129, 12288)])
def test_silu_mul_equals_reference(device, dtype, rows, size):
    gate_up = torch.randn(rows, 2 * size, dtype=dtype, device=device)
    output, check_guards = guarded((rows, size), dtype, device)
    silu_mul(gate_up, output)
    check_guards()
    assert_close(output, silu_mul_reference(gate_up))


@pytest.mark.parametrize("device", DEVICES)
def test_silu_mul_strided_and_empty(device):
    wide = torch.randn(5, 100, device=device)
    assert_close(silu_mul(wide[:, 10:40]), silu_mul_reference(wide[:, 10:40]))
    assert silu_mul(torch.empty(0, 8, device=device)).shape == (0, 4)


def test_silu_mul_refuses_bad_input():
    with pytest.raises(RuntimeError, match=r"output: expected shape \[2, 4\], got \[2, 5\]"):
        silu_mul(torch.zeros(2, 8), torch.zeros(2, 5))
    with pytest.raises(
        RuntimeError, match="gate_up: expected float32, float16 or bfloat16, got int64"
    ):
        silu_mul(torch.zeros(2, 8, dtype=torch.int64))


def test_silu_mul_opcheck():
    check_op(torch.ops.dflash.silu_mul.default, (torch.randn(3, 16), torch.empty(3, 8)))
