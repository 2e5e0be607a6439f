# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.add_rms_norm import add_rms_norm, add_rms_norm_reference

from .support import DEVICES, DTYPES, assert_close, check_op, guarded

EPS = 1e-5
SIZES = [8, 17, 576, 4096, 5120, 33000]


def make(rows, size, dtype, device):
    x, residual = torch.randn(2, rows, size, device=device).to(dtype)
    weight = torch.rand(size, device=device).add(0.5).to(dtype)
    return x, residual, weight


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 17, 129])
def test_add_rms_norm_equals_reference(device, dtype, size, rows):
    if rows * size > 1 << 20:
        rows = 9
    x, residual, weight = make(rows, size, dtype, device)
    expected, expected_residual = add_rms_norm_reference(x, residual, weight, EPS)
    output, check_output = guarded((rows, size), dtype, device)
    inner, check_residual = guarded((rows, size), dtype, device)
    inner.copy_(residual)
    add_rms_norm(x, inner, weight, EPS, output)
    check_output()
    check_residual()
    # The sum of two values is rounded once: no tolerance.
    torch.testing.assert_close(inner, expected_residual, rtol=0, atol=0)
    assert_close(output, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [17, 576, 4096])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(device, dtype, size):
    x, residual, weight = make(1500, size, dtype, device)
    alone = torch.cat(
        [add_rms_norm(x[i : i + 1], residual[i : i + 1].clone(), weight, EPS) for i in range(8)]
    )
    together = add_rms_norm(x, residual, weight, EPS)[:8]
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [17, 576, 4096])
def test_tap_is_the_new_residual_in_its_columns_only(device, dtype, size):
    x, residual, weight = make(5, size, dtype, device)
    taps, check_guards = guarded((6, 3 * size), dtype, device)
    before = taps.clone()
    add_rms_norm(x, residual, weight, EPS, tap=taps[:5, size : 2 * size])
    check_guards()
    torch.testing.assert_close(taps[:5, size : 2 * size], residual, rtol=0, atol=0)
    taps[:5, size : 2 * size] = before[:5, size : 2 * size]
    torch.testing.assert_close(taps, before, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_x_the_residual_stays(device, dtype):
    _, residual, weight = make(7, 576, dtype, device)
    before = residual.clone()
    tap = torch.empty_like(residual)
    output = add_rms_norm(None, residual, weight, EPS, tap=tap)
    torch.testing.assert_close(residual, before, rtol=0, atol=0)
    torch.testing.assert_close(tap, before, rtol=0, atol=0)
    assert_close(output, add_rms_norm_reference(None, before, weight, EPS)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_strided_and_unaligned_rows(device, offset):
    wide = torch.randn(4, 5, 200, device=device)
    x, residual, output, tap = wide[:, :, offset : offset + 64]
    weight = torch.randn(80, device=device)[offset : offset + 64]
    expected, expected_residual = add_rms_norm_reference(x, residual, weight, EPS)
    rest = wide.clone()
    add_rms_norm(x, residual, weight, EPS, output, tap)
    assert_close(output, expected)
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    torch.testing.assert_close(tap, expected_residual, rtol=0, atol=0)
    rest[1:, :, offset : offset + 64] = wide[1:, :, offset : offset + 64]
    torch.testing.assert_close(wide, rest, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_norm_is_of_the_rounded_residual(device):
    # 256 + 1 is 256 in bfloat16: the mean square must be of 256, not 257.
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    x, weight = torch.ones_like(residual), torch.ones(64, dtype=torch.bfloat16, device=device)
    assert (add_rms_norm(x, residual, weight, 0.0) == 1.0).all()
    assert (residual == 256.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_output_may_be_x(device):
    x, residual, weight = make(3, 576, torch.float32, device)
    expected, _ = add_rms_norm_reference(x, residual, weight, EPS)
    assert_close(add_rms_norm(x, residual, weight, EPS, output=x), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    empty = torch.empty(0, 8, device=device)
    assert add_rms_norm(empty, empty.clone(), torch.ones(8, device=device), EPS).shape == (0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_cpu_twin(dtype):
    x, residual, weight = make(300, 4096, dtype, "cpu")
    on_gpu = [t.cuda() for t in (x, residual)]
    actual = add_rms_norm(*on_gpu, weight.cuda(), EPS)
    assert_close(actual, add_rms_norm(x, residual, weight, EPS))
    torch.testing.assert_close(on_gpu[1].cpu(), residual, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"x": torch.zeros(2, 9)}, r"x: expected shape \[2, 8\], got \[2, 9\]"),
        ({"x": torch.zeros(2, 8).half()}, "x: expected float32, got float16"),
        ({"residual": torch.zeros(8)}, r"residual: expected shape \[\*, \*\], got \[8\]"),
        ({"weight": torch.zeros(7)}, r"weight: expected shape \[8\], got \[7\]"),
        ({"output": torch.zeros(3, 8)}, r"output: expected shape \[2, 8\], got \[3, 8\]"),
        (
            {"tap": torch.zeros(2, 16)[:, ::2]},
            "tap: the last dimension must be contiguous, got stride 2",
        ),
    ],
)
def test_messages_name_the_tensor(change, message):
    arguments = {
        "x": torch.zeros(2, 8),
        "residual": torch.zeros(2, 8),
        "weight": torch.ones(8),
        "eps": EPS,
        "output": torch.zeros(2, 8),
    }
    with pytest.raises(RuntimeError, match=message):
        add_rms_norm(**{**arguments, **change})


def test_opcheck():
    op = torch.ops.dflash.add_rms_norm.default
    x, residual, weight = make(3, 16, torch.float32, "cpu")
    tap = torch.empty(3, 48)[:, 16:32]
    check_op(op, (x, residual, weight, EPS, torch.empty(3, 16), tap))
    check_op(op, (None, residual, weight, EPS, torch.empty(3, 16), None))
