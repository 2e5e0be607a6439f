# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.linear_fp8 import fp8_is_streamed, linear_fp8, pack_fp8, quantize_fp8
from dflash.ops.linear_silu_mul_fp8 import (
    in_turns,
    linear_silu_mul_fp8,
    linear_silu_mul_fp8_reference,
)
from dflash.ops.silu_mul import silu_mul

from .support import DEVICES, DTYPES, OPCHECKS, assert_close, check_op, guarded


def operands(rows, outputs, size, dtype, device):
    """x; gate and up as e4m3 with their scales; the same two in turns and packed."""
    x = torch.randn(rows, size, dtype=dtype, device=device)
    gate_up = torch.randn(2 * outputs, size, device=device) * size**-0.5
    plain, turned = quantize_fp8(gate_up), quantize_fp8(in_turns(gate_up))
    packed = pack_fp8(turned[0])
    if packed.is_cuda:
        torch.cuda.synchronize()  # a product reads the weight before it waits for the kernel before it
    return x, plain, (packed, turned[1])


def test_rows_take_turns():
    gate_up = torch.arange(48.0)[:, None].expand(48, 3)
    gate, up = range(24), range(24, 48)
    expected = [row for i in (0, 8, 16) for half in (gate, up) for row in half[i : i + 8]]
    assert in_turns(gate_up)[:, 1].tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,outputs,size", [(1, 8, 1), (3, 40, 17), (8, 1536, 576), (33, 72, 136), (129, 40, 64)]
)
def test_linear_silu_mul_fp8_equals_reference(device, dtype, rows, outputs, size):
    x, plain, packed = operands(rows, outputs, size, dtype, device)
    output, check_guards = guarded((rows, outputs), dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    linear_silu_mul_fp8(x, *packed, output)
    check_guards()
    tolerance = 2e-5 if dtype == torch.float32 else None
    assert_close(output, linear_silu_mul_fp8_reference(x, *plain), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outputs,size", [(72, 192), (64 * 67, 328), (12288, 1024)])
def test_one_kernel_has_the_bits_of_two(dtype, outputs, size):
    for rows in (1, 5, 16, 33, 128, 200):
        x, _, (weight, scale) = operands(rows, outputs, size, dtype, "cuda")
        assert fp8_is_streamed(x)
        gate_up = linear_fp8(x, weight, scale)
        expected = silu_mul(gate_up.view(-1, 16)).view(rows, outputs)
        assert torch.equal(linear_silu_mul_fp8(x, weight, scale), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_linear_silu_mul_fp8_strided_and_empty(device):
    wide = torch.randn(5, 100, device=device)
    _, plain, packed = operands(1, 16, 30, torch.float32, device)
    x = wide[:, 10:40]
    expected = linear_silu_mul_fp8_reference(x, *plain)
    assert_close(linear_silu_mul_fp8(x, *packed), expected, 2e-5)
    outside = torch.full((5, 30), 7.0, device=device)
    linear_silu_mul_fp8(x, *packed, outside[:, 4:20])
    assert_close(outside[:, 4:20], expected, 2e-5)
    assert (outside[:, :4] == 7).all() and (outside[:, 20:] == 7).all()
    assert linear_silu_mul_fp8(torch.empty(0, 30, device=device), *packed).shape == (0, 16)


def test_linear_silu_mul_fp8_refuses_bad_input():
    x, _, (weight, scale) = operands(2, 16, 30, torch.float32, "cpu")
    with pytest.raises(
        RuntimeError, match="scale: expected 8 of gate and 8 of up in turns, got 24"
    ):
        linear_silu_mul_fp8(x, weight, scale[:24])
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[1, 2, 4096\], got \[1, 1, 4"):
        linear_silu_mul_fp8(torch.zeros(2, 65), weight, scale)
    with pytest.raises(RuntimeError, match=r"output: expected shape \[2, 16\], got \[2, 32\]"):
        linear_silu_mul_fp8(x, weight, scale, torch.zeros(2, 32))
    shifted = torch.zeros(4097, dtype=torch.uint8)[1:].view(weight.shape).view(weight.dtype)
    with pytest.raises(RuntimeError, match="weight: expected an address of whole 16 bytes"):
        linear_silu_mul_fp8(x, shifted, scale)


def test_linear_silu_mul_fp8_opcheck():
    x, _, (weight, scale) = operands(3, 8, 16, torch.float32, "cpu")
    arguments = (x, weight, scale, torch.empty(3, 8))
    # test_schema cannot multiply fp8 tensors: see test_linear_fp8.py.
    check_op(torch.ops.dflash.linear_silu_mul_fp8.default, arguments, opchecks=OPCHECKS[1:])
