# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.linear import linear, linear_plan, linear_reference

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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows,outputs,size",
    [(1, 1, 1), (3, 77, 72), (16, 4099, 64), (60, 300, 5128), (128, 9001, 328), (129, 960, 576)],
)
def test_sums_in_fp32(device, dtype, rows, outputs, size):
    x = torch.randn(rows, size, dtype=dtype, device=device)
    weight = torch.randn(outputs, size, dtype=dtype, device=device) * size**-0.5
    output, check_guards = guarded((rows, outputs), torch.float32, device)
    linear(x, weight, None, output)
    check_guards()
    # Tensor cores truncate where they add: thousands of terms show in the fifth digit.
    assert_close(output, linear_reference(x, weight, dtype=torch.float32), 1e-4)
    if linear_plan(x, weight) is not None:
        assert torch.equal(output.to(dtype), linear(x, weight))
    wide = torch.full((rows, outputs + 9), 7.0, device=device)
    linear(x, weight, None, wide[:, 4 : outputs + 4])
    assert_close(wide[:, 4 : outputs + 4], output, 1e-4)  # the library chooses by the strides
    assert (wide[:, :4] == 7).all() and (wide[:, outputs + 4 :] == 7).all()


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
    half = torch.zeros(4, 8).half()
    with pytest.raises(RuntimeError, match="bias: not with a float32 output of 16-bit x"):
        linear(half, half, half[:, 0].contiguous(), torch.zeros(4, 4))
    with pytest.raises(RuntimeError, match="output: expected float32, got float16"):
        linear(half.float(), half.float(), None, torch.zeros(4, 4).half())


def test_linear_opcheck():
    arguments = (torch.randn(3, 16), torch.randn(5, 16), torch.randn(5), torch.empty(3, 5))
    check_op(torch.ops.dflash.linear.default, arguments)


def on_gpu(dtype, rows, outputs, size):
    """x, weight and bias for the streaming GEMM."""
    x = torch.randn(rows, size, dtype=dtype, device="cuda")
    weight = torch.randn(outputs, size, dtype=dtype, device="cuda") * size**-0.5
    return x, weight, torch.randn(outputs, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 127, 128])
@pytest.mark.parametrize(
    "outputs,size",
    [(8, 8), (1, 64), (77, 72), (576, 1536), (960, 576), (4096, 4096), (24576, 512), (300, 20480)],
)
def test_streamed_equals_torch(dtype, rows, outputs, size):
    x, weight, bias = on_gpu(dtype, rows, outputs, size)
    assert linear_plan(x, weight) is not None
    output, check_guards = guarded((rows, outputs), dtype, "cuda")
    linear(x, weight, bias, output)
    check_guards()
    assert_close(output, torch.nn.functional.linear(x.double(), weight.double(), bias.double()))


@pytest.mark.gpu
@pytest.mark.parametrize("outputs,size", [(77, 72), (576, 1536), (4096, 4096), (24576, 512)])
def test_streamed_row_does_not_depend_on_the_others(outputs, size):
    x, weight, bias = on_gpu(torch.bfloat16, 128, outputs, size)
    together = linear(x, weight, bias)
    for rows in (1, 7, 16, 32, 50, 127):
        assert torch.equal(linear(x[:rows], weight, bias), together[:rows])
    assert torch.equal(linear(x[96:], weight, bias), together[96:])


@pytest.mark.gpu
@pytest.mark.parametrize("outputs,size", [(4096, 4096), (576, 1536)])
def test_streamed_splits_are_bitwise_repeatable(outputs, size):
    x, weight, bias = on_gpu(torch.bfloat16, 16, outputs, size)
    assert linear_plan(x, weight)[2] == 2
    first, output = linear(x, weight, bias), torch.empty(16, outputs, dtype=x.dtype, device="cuda")
    for i in range(1000):
        output.fill_(float("nan") if i % 2 else i)
        assert torch.equal(linear(x, weight, bias, output), first), f"repeat {i}"


@pytest.mark.gpu
def test_streamed_reads_and_writes_strided_rows():
    x, weight, _ = on_gpu(torch.bfloat16, 40, 200, 264)
    outside = torch.full((40, 211), 7.0, dtype=x.dtype, device="cuda")
    linear(x, weight, None, outside[:, 3:203])
    assert torch.equal(outside[:, 3:203], linear(x, weight))
    assert (outside[:, :3] == 7).all() and (outside[:, 203:] == 7).all()
    padded = torch.full((40, 272), float("nan"), dtype=x.dtype, device="cuda")
    padded[:, :264] = x
    assert torch.equal(linear(padded[:, :264], weight), linear(x, weight))


@pytest.mark.gpu
def test_plan_names_what_the_library_serves():
    x, weight, _ = on_gpu(torch.bfloat16, 4, 16, 64)
    assert linear_plan(x, weight) == (16, 1, 1)
    assert linear_plan(*on_gpu(torch.bfloat16, 129, 16, 64)[:2]) is None
    assert linear_plan(*on_gpu(torch.bfloat16, 4, 16, 12)[:2]) is None
    assert linear_plan(x.float(), weight.float()) is None
    assert linear_plan(x[:, 1:57], weight[:, 1:57]) is None
    assert linear_plan(*on_gpu(torch.bfloat16, 16, 4096, 4096)[:2]) == (16, 1, 2)
    assert linear_plan(*on_gpu(torch.bfloat16, 100, 24576, 64)[:2]) == (128, 3, 1)


@pytest.mark.gpu
def test_streamed_in_a_graph_reads_what_was_just_written():
    """norm-like writer, product, product, 20 times in one graph, replayed with other inputs."""
    x, weight, _ = on_gpu(torch.bfloat16, 16, 1024, 1024)
    source, outputs = torch.zeros_like(x), [torch.empty_like(x) for _ in range(20)]

    def chain():
        for i, output in enumerate(outputs):
            torch.mul(source, 1.0 + i, out=x)
            linear(linear(x, weight), weight, None, output)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        source.copy_(torch.randn_like(source))
        graph.replay()
        for i, output in enumerate(outputs):
            torch.cuda.synchronize()
            alone = linear(source * (1.0 + i), weight)
            torch.cuda.synchronize()
            assert torch.equal(output, linear(alone, weight))
