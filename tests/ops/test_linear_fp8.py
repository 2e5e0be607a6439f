# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.linear_fp8 import (
    fp8_is_streamed,
    linear_fp8,
    linear_fp8_reference,
    pack_fp8,
    quantize_fp8,
    unpack_fp8,
)

from .support import DEVICES, DTYPES, OPCHECKS, assert_close, check_op, guarded

FP8 = torch.float8_e4m3fn
ALL_BYTES = torch.arange(256, dtype=torch.uint8)
FINITE = ALL_BYTES[(ALL_BYTES & 0x7F) != 0x7F]
"""Every e4m3 value but NaN: subnormals, both zeros, +-448."""


def random_weight(outputs, size, device="cpu"):
    """All values of e4m3 at random; scales within 4 times of each other, so that a norm sees every output."""
    at = torch.randint(len(FINITE), (outputs, size), device=device)
    scale = torch.exp2(2 * torch.rand(outputs, device=device) - 8) * size**-0.5
    return FINITE.to(device)[at].view(FP8), scale


def packed_before(weight):
    """As a product needs it, which on a GPU reads the weight before it waits for the kernel before it."""
    packed = pack_fp8(weight)
    if packed.is_cuda:
        torch.cuda.synchronize()
    return packed


def operands(rows, outputs, size, dtype, device):
    """x, the weight as it is and packed, scale, bias."""
    weight, scale = random_weight(outputs, size, device)
    x = torch.randn(rows, size, dtype=dtype, device=device)
    bias = torch.randn(outputs, dtype=dtype, device=device)
    return x, weight, packed_before(weight), scale, bias


def test_packed_bytes_lie_where_the_kernel_reads_them():
    """Lane 4 g + t of a warp of 16 rows: rows g + 8, g in turns, inputs 2 t, 2 t + 1 of every eight."""
    m, k = 130, 200
    weight = torch.randint(0, 127, (m, k), dtype=torch.uint8).view(FP8)
    packed = pack_fp8(weight).view(torch.uint8)
    assert packed.shape == (3, 4, 4096) and packed.is_contiguous()
    expected = torch.zeros(192, 256, dtype=torch.uint8)
    expected[:m, :k] = weight.view(torch.uint8)
    for row, column in [(0, 0), (8, 0), (5, 3), (13, 62), (77, 130), (129, 199), (191, 255)]:
        r, c = row % 64, column % 64
        lane = r % 8 * 4 + c % 8 // 2
        at = r // 16 * 1024 + c // 32 * 512 + lane * 16 + c % 32 // 8 * 4 + c % 2 * 2
        at += 0 if r % 16 >= 8 else 1
        assert packed[row // 64, column // 64, at] == expected[row, column], (row, column)


@pytest.mark.parametrize("m,k", [(1, 1), (64, 64), (65, 63), (200, 576), (3, 129)])
def test_unpacking_gives_back_what_was_packed(m, k):
    weight = torch.randint(0, 256, (m, k), dtype=torch.uint8).view(FP8)
    packed = pack_fp8(weight)
    assert torch.equal(unpack_fp8(packed, m, k).view(torch.uint8), weight.view(torch.uint8))
    padding = packed.view(torch.uint8).count_nonzero()
    assert padding == weight.view(torch.uint8).count_nonzero()


def test_quantize_scales_every_row_to_its_largest():
    weight = torch.randn(40, 300) * torch.exp2(torch.arange(-20.0, 20.0))[:, None]
    weight[7] = 0
    rounded, scale = quantize_fp8(weight)
    assert rounded.dtype == FP8 and scale.dtype == torch.float32 and scale.shape == (40,)
    torch.testing.assert_close(scale * 448, torch.where(scale == 1, 448.0, weight.abs().amax(1)))
    assert scale[7] == 1 and (rounded[7].float() == 0).all()
    others = torch.arange(40) != 7
    assert (rounded.float().abs().amax(1)[others] == 448).all()
    error = (rounded.float() * scale[:, None] - weight).abs()
    # Half a unit of 3 mantissa bits, and below 2^-6 half of a step of 2^-9.
    bound = torch.maximum(weight.abs() / 16, scale[:, None] * 2.0**-10)
    assert (error <= bound * 1.0001).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantize_16_bit_weights_as_their_fp32_values(dtype):
    weight = torch.randn(9, 70).to(dtype)
    for got, expected in zip(quantize_fp8(weight), quantize_fp8(weight.float()), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,outputs,size", [(1, 1, 1), (3, 7, 17), (8, 960, 576), (33, 65, 1536), (130, 300, 72)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_fp8_equals_reference(device, dtype, rows, outputs, size, has_bias):
    x, weight, packed, scale, bias = operands(rows, outputs, size, dtype, device)
    bias = bias if has_bias else None
    output, check_guards = guarded((rows, outputs), dtype, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    linear_fp8(x, packed, scale, bias, output)
    check_guards()
    expected = linear_fp8_reference(x, weight, scale, bias)
    assert_close(output, expected, 2e-5 if dtype == torch.float32 else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_is_exact(device, dtype):
    """x picks one weight: what comes out is that weight times its scale, subnormals and zeros too."""
    weight = FINITE.repeat(3, 1).to(device).view(FP8)  # [3, 254]
    x = torch.eye(254, 256, dtype=dtype, device=device)[:, :254]  # rows of whole 16 bytes
    scale = torch.tensor([1.0, 0.5, 2.0**-4], device=device)
    expected = (weight.float() * scale[:, None]).T.to(dtype)
    assert torch.equal(linear_fp8(x, packed_before(weight), scale), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_linear_fp8_strided_and_empty(device):
    wide, (weight, scale) = torch.randn(5, 100, device=device), random_weight(9, 30, device)
    packed = packed_before(weight)
    x = wide[:, 10:40]
    assert_close(linear_fp8(x, packed, scale), linear_fp8_reference(x, weight, scale), 2e-5)
    outside = torch.full((5, 20), 7.0, device=device)
    linear_fp8(x, packed, scale, None, outside[:, 4:13])
    assert_close(outside[:, 4:13], linear_fp8_reference(x, weight, scale), 2e-5)
    assert (outside[:, :4] == 7).all() and (outside[:, 13:] == 7).all()
    assert linear_fp8(torch.empty(0, 30, device=device), packed, scale).shape == (0, 9)


def test_linear_fp8_refuses_bad_input():
    weight, scale = random_weight(70, 80)
    packed, x = pack_fp8(weight), torch.zeros(2, 80)
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[2, 2, 4096\], got \[70, 80"):
        linear_fp8(x, weight, scale)
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[2, 3, 4096\], got \[2, 2"):
        linear_fp8(torch.zeros(2, 129), packed, scale)
    with pytest.raises(RuntimeError, match="weight: expected float8_e4m3fn, got uint8"):
        linear_fp8(x, packed.view(torch.uint8), scale)
    with pytest.raises(RuntimeError, match="scale: expected float32, got float16"):
        linear_fp8(x, packed, scale.half())
    with pytest.raises(RuntimeError, match=r"bias: expected shape \[70\], got \[71\]"):
        linear_fp8(x, packed, scale, torch.zeros(71))
    with pytest.raises(RuntimeError, match=r"output: expected shape \[2, 70\], got \[2, 64\]"):
        linear_fp8(x, packed, scale, None, torch.zeros(2, 64))
    shifted = torch.zeros(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape).view(FP8)
    with pytest.raises(RuntimeError, match="weight: expected an address of whole 16 bytes"):
        linear_fp8(x, shifted, scale)


def test_linear_fp8_opcheck():
    x, _, packed, scale, bias = operands(3, 5, 16, torch.float32, "cpu")
    arguments = (x, packed, scale, bias, torch.empty(3, 5))
    # torch cannot multiply fp8 tensors, with which test_schema looks for arguments that changed.
    check_op(torch.ops.dflash.linear_fp8.default, arguments, opchecks=OPCHECKS[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 127, 128, 129, 300])
@pytest.mark.parametrize(
    "outputs,size",
    [
        (8, 8),
        (1, 64),
        (77, 72),
        (576, 1536),
        (960, 576),
        (4096, 4096),
        (6144, 4096),
        (24576, 512),
        (300, 20480),
    ],
)
def test_streamed_equals_torch(dtype, rows, outputs, size):
    x, weight, packed, scale, bias = operands(rows, outputs, size, dtype, "cuda")
    assert fp8_is_streamed(x)
    output, check_guards = guarded((rows, outputs), dtype, "cuda")
    linear_fp8(x, packed, scale, bias, output)
    check_guards()
    assert_close(output, linear_fp8_reference(x, weight, scale, bias))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "outputs,size", [(77, 72), (576, 1536), (4096, 4096), (6144, 4096), (24576, 512)]
)
def test_streamed_row_does_not_depend_on_the_others(outputs, size):
    x, _, packed, scale, bias = operands(200, outputs, size, torch.bfloat16, "cuda")
    together = linear_fp8(x, packed, scale, bias)
    for rows in (1, 7, 16, 32, 50, 127, 128, 129):
        assert torch.equal(linear_fp8(x[:rows], packed, scale, bias), together[:rows])
    assert torch.equal(linear_fp8(x[96:], packed, scale, bias), together[96:])


@pytest.mark.gpu
@pytest.mark.parametrize("outputs,size", [(4096, 4096), (576, 1536), (6144, 4096), (10240, 4096)])
@pytest.mark.parametrize("rows", [16, 128])
def test_streamed_splits_are_bitwise_repeatable(outputs, size, rows):
    """One, two and three warpgroups whose place in the end lies over the weights of all."""
    x, _, packed, scale, bias = operands(rows, outputs, size, torch.bfloat16, "cuda")
    first = linear_fp8(x, packed, scale, bias)
    output = torch.empty_like(first)
    for i in range(1000):
        output.fill_(float("nan") if i % 2 else i)
        assert torch.equal(linear_fp8(x, packed, scale, bias, output), first), f"repeat {i}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_in_parts_equals_torch(dtype):
    """x whose rows are not whole 16-byte words, and a weight of more than one part."""
    wide, weight, _, scale, bias = operands(20, 9000, 2051, dtype, "cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    for x, w in ((wide, weight), (wide[:, 1:2049], weight[:, 1:2049])):
        assert not fp8_is_streamed(x)
        output = linear_fp8(x, packed_before(w.contiguous()), scale, bias)
        assert_close(output, linear_fp8_reference(x, w, scale, bias))


@pytest.mark.gpu
def test_streamed_in_a_graph_reads_what_was_just_written():
    """norm-like writer, product, product, 20 times in one graph, replayed with other inputs."""
    x, _, packed, scale, _ = operands(16, 1024, 1024, torch.bfloat16, "cuda")
    scale.fill_(2.0**-13)
    source, outputs = torch.zeros_like(x), [torch.empty_like(x) for _ in range(20)]

    def product(x, output=None):
        return linear_fp8(x, packed, scale, None, output)

    def chain():
        for i, output in enumerate(outputs):
            torch.mul(source, 1.0 + i, out=x)
            product(product(x), output)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        source.copy_(torch.randn_like(source))
        graph.replay()
        for i, output in enumerate(outputs):
            torch.cuda.synchronize()
            alone = product(source * (1.0 + i))
            torch.cuda.synchronize()
            assert torch.equal(output, product(alone))
