# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass, field

import pytest
import torch

from dflash.ops.paged_attention import paged_attention, paged_attention_reference

from .support import DEVICES, DTYPES, RELATIVE_ERROR, assert_close, check_op, guarded

QUERY_LENS = [1, 2, 16, 17, 33, 129]
CONTEXT_LENS = [0, 1, 15, 16, 17, 100, 1000]
NAN = float("nan")


@dataclass
class Batch:
    """One call's arguments; every slot that no request sees holds NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    scale: float
    causal: bool = True
    options: dict = field(default_factory=dict)

    def args(self):
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.max_query_len,
            self.max_seq_len,
            self.scale,
            self.causal,
        )

    def run(self, **more):
        return paged_attention(*self.args(), **{**self.options, **more})

    def expected(self):
        options = {k: v for k, v in self.options.items() if k != "num_splits"}
        return paged_attention_reference(*self.args(), **options)

    def check(self, tolerance=None):
        output, check_guards = guarded(self.query.shape, self.query.dtype, self.query.device)
        output.zero_()
        self.run(output=output)
        check_guards()
        assert_close(output, self.expected(), tolerance)


def make_cache(num_blocks, kv_block_size, num_kv_heads, head_dim, dtype, device, layout):
    shape = (num_blocks, kv_block_size, num_kv_heads, head_dim)
    if layout == "HND":
        shape = (num_blocks, num_kv_heads, kv_block_size, head_dim)
    cache = torch.full(shape, NAN, device=device).to(dtype)
    return cache.transpose(1, 2) if layout == "HND" else cache


def make_batch(
    lens,
    dtype=torch.float32,
    device="cpu",
    heads=(4, 2),
    head_dim=64,
    kv_block_size=16,
    layout="NHD",
    kv_dtype=None,
    causal=True,
    seed=0,
    **options,
):
    """lens: (query_len, seq_len) of each request."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    num_heads, num_kv_heads = heads
    kv_dtype = kv_dtype or dtype
    window_left = options.get("window_left", -1)
    max_seq_len = max([s for _, s in lens] + [1])
    max_blocks = -(-max_seq_len // kv_block_size) + 1
    num_blocks = 1 + max_blocks * len(lens)
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    block_table = order.view(len(lens), max_blocks).clone()
    caches = [
        make_cache(num_blocks, kv_block_size, num_kv_heads, head_dim, kv_dtype, device, layout)
        for _ in range(2)
    ]
    for r, (query_len, seq_len) in enumerate(lens):
        first = max(seq_len - query_len - window_left, 0) if window_left >= 0 else 0
        keys = torch.arange(first, seq_len)
        blocks = block_table[r].long()[keys // kv_block_size].to(device)
        offsets = (keys % kv_block_size).to(device)
        for cache in caches:
            rows = randn(len(keys), num_kv_heads, head_dim).to(kv_dtype).to(device)
            if kv_dtype == torch.float8_e4m3fn:
                cache.view(torch.uint8)[blocks, offsets] = rows.view(torch.uint8)
            else:
                cache[blocks, offsets] = rows
        # Pages left behind by a window or not reached yet go back to the pool.
        block_table[r, -(-seq_len // kv_block_size) :] = 0
        block_table[r, : first // kv_block_size] = 0
    query_lens = torch.tensor([q for q, _ in lens], dtype=torch.int32)
    query_start_loc = torch.zeros(len(lens) + 1, dtype=torch.int32)
    query_start_loc[1:] = query_lens.cumsum(0)
    num_rows = int(query_start_loc[-1])
    qkv = randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype).to(device)
    return Batch(
        qkv[:, : num_heads * head_dim].view(num_rows, num_heads, head_dim),
        *caches,
        block_table.to(device),
        torch.tensor([s for _, s in lens], dtype=torch.int32, device=device),
        query_start_loc.to(device),
        max([q for q, _ in lens] + [0]),
        max_seq_len,
        head_dim**-0.5,
        causal,
        {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()},
    )


def ragged_lens(shift):
    """Every query length beside a context of the awkward set, in another pairing for each shift."""
    return [
        (q, q + CONTEXT_LENS[(i + shift) % len(CONTEXT_LENS)]) for i, q in enumerate(QUERY_LENS)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shift", range(len(CONTEXT_LENS)))
def test_paged_attention_ragged_lengths(device, dtype, causal, shift):
    make_batch(ragged_lens(shift), dtype, device, causal=causal).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("query_len", [1, 33])
def test_paged_attention_head_dims(device, dtype, head_dim, query_len):
    batch = make_batch([(query_len, 170), (query_len, 33)], dtype, device, head_dim=head_dim)
    batch.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [1, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("query_len", [1, 2, 17])
def test_paged_attention_group_ratios(device, dtype, ratio, query_len):
    lens = [(query_len, 90), (1, 1), (query_len, query_len)]
    make_batch(lens, dtype, device, heads=(2 * ratio, 2), causal=False).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left,right", [(0, 0), (7, -1), (64, 3), (500, 500), (5000, -1), (-1, 2)])
def test_paged_attention_windows(device, dtype, causal, left, right):
    lens = [(1, 1000), (17, 17), (33, 300), (129, 700), (2, 66)]
    options = {"window_left": left, "window_right": right}
    make_batch(lens, dtype, device, causal=causal, **options).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_block_size", [1, 3, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_attention_layouts(device, dtype, kv_block_size, layout):
    lens = [(5, 200), (1, 64), (16, 16)]
    make_batch(lens, dtype, device, kv_block_size=kv_block_size, layout=layout).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [-3.0, 0.0, 6.0, float("-inf")])
def test_paged_attention_sinks(device, dtype, sink):
    lens = [(1, 700), (16, 16), (33, 100), (3, 0)]
    sinks = torch.linspace(-1, 1, 6) + sink
    make_batch(lens, dtype, device, heads=(6, 2), sinks=sinks).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_paged_attention_fp8_cache(device, dtype, head_dim, layout):
    batch = make_batch(
        [(17, 333), (1, 65), (2, 2)],
        dtype,
        device,
        head_dim=head_dim,
        layout=layout,
        kv_dtype=torch.float8_e4m3fn,
        k_scale=torch.tensor([0.7]),
        v_scale=torch.tensor([1.9]),
    )
    batch.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_attention_prefill_chunks(device, dtype):
    make_batch([(700, 1300), (513, 513)], dtype, device, heads=(3, 1)).check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_padded_requests_give_zeros_and_other_rows_stay(device, dtype):
    batch = make_batch([(4, 40), (4, 0), (4, 2), (0, 9)], dtype, device)
    batch.key_cache[0] = batch.value_cache[0] = NAN
    query = torch.cat([batch.query, batch.query[:3]])
    output = torch.full_like(query, 5.0)
    batch.query = query
    batch.run(output=output)
    expected = batch.expected()
    assert_close(output[:12], expected[:12])
    assert (output[4:8] == 0).all()
    assert (output[8:10] == 0).all(), "rows before position 0 see nothing"
    assert (output[12:] == 5).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_bounds_keys_by_the_table_and_by_max_seq_len(device, dtype):
    batch = make_batch([(3, 50), (2, 80)], dtype, device, causal=False)
    batch.seq_lens = batch.seq_lens + 100000
    batch.max_seq_len = 30
    batch.check()
    batch.block_table = batch.block_table[:, :1]
    batch.max_seq_len = 1 << 40
    batch.check()
    batch.block_table = batch.block_table[:, :0]
    assert (batch.run() == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_reads_unknown_blocks_as_zeros(device, dtype):
    batch = make_batch([(2, 40)], dtype, device, causal=False)
    batch.block_table[0, 0], batch.block_table[0, 2] = -7, 1 << 30
    output = batch.run()
    fixed = batch.block_table.clone()
    batch.key_cache[0] = batch.value_cache[0] = 0.0
    fixed[0, 0] = fixed[0, 2] = 0
    batch.block_table = fixed
    assert_close(output, batch.expected())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_takes_unaligned_strides(device, dtype):
    batch = make_batch([(5, 70), (1, 130)], dtype, device)
    for name in ("query", "key_cache", "value_cache"):
        tensor = getattr(batch, name)
        wide = torch.full((*tensor.shape[:-1], 71), NAN, dtype=dtype, device=device)
        view = wide[..., 3:67]
        view.copy_(tensor)
        setattr(batch, name, view)
    wide = torch.zeros(6, 4, 67, dtype=dtype, device=device)
    batch.run(output=wide[..., 1:65])
    assert_close(wide[..., 1:65], batch.expected())
    assert (wide[..., 0] == 0).all() and (wide[..., 65:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_paged_attention_nan_of_a_visible_key_is_not_hidden(device):
    batch = make_batch([(2, 20)], device=device)
    batch.key_cache[batch.block_table[0, 0].long(), 0] = NAN
    assert batch.run().isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_paged_attention_empty(device):
    batch = make_batch([(0, 0)], device=device)
    assert batch.run().shape == (0, 4, 64)
    batch = make_batch([(3, 9)], device=device)
    output = torch.full_like(batch.query, 5.0)
    no_request = torch.empty(0, dtype=torch.int32, device=device)
    batch.block_table, batch.seq_lens = batch.block_table[:0], no_request
    batch.query_start_loc = batch.query_start_loc[:1]
    assert (batch.run(output=output) == 5).all()


def test_paged_attention_small_head_dims_on_a_cpu():
    for head_dim in (8, 16, 40):
        make_batch([(5, 70), (1, 130)], head_dim=head_dim, heads=(3, 1)).check()


def test_paged_attention_does_not_depend_on_the_thread_count():
    batch = make_batch([(8, 512)], heads=(9, 3))
    threads = torch.get_num_threads()
    try:
        outputs = []
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            outputs.append(batch.run())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def row_alone(batch, r, row):
    """Row `row` of request r as a call of its own; what follows it in the request is cut off."""
    first = int(batch.query_start_loc[r])
    query_len = int(batch.query_start_loc[r + 1]) - first
    return Batch(
        batch.query[first + row : first + row + 1],
        batch.key_cache,
        batch.value_cache,
        batch.block_table[r : r + 1],
        batch.seq_lens[r : r + 1] - query_len + row + 1,
        torch.tensor([0, 1], dtype=torch.int32, device=batch.query.device),
        1,
        batch.max_seq_len,
        batch.scale,
        options=batch.options,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4, 8])
@pytest.mark.parametrize("window_left", [-1, 70])
def test_paged_attention_rows_do_not_depend_on_the_batch(device, dtype, num_splits, window_left):
    lens = [(16, 700), (1, 333), (45, 45), (8, 72)]
    options = {"num_splits": num_splits, "window_left": window_left}
    batch = make_batch(lens, dtype, device, heads=(8, 2), head_dim=128, **options)
    together = batch.run()
    batch.check()
    for r, (query_len, _) in enumerate(lens):
        for row in {0, query_len // 2, query_len - 1}:
            alone = row_alone(batch, r, row).run()
            at = int(batch.query_start_loc[r]) + row
            assert torch.equal(alone[0], together[at]), f"request {r}, row {row}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 2, 4, 8])
def test_paged_attention_any_number_of_splits(device, num_splits):
    for lens in ([(3, 700), (1, 31), (4, 0)], [(40, 40), (17, 1000)]):
        for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
            batch = make_batch(lens, torch.bfloat16, device, kv_dtype=kv_dtype)
            assert_close(batch.run(num_splits=num_splits), batch.expected())


def test_paged_attention_refuses_bad_input():
    batch = make_batch([(2, 300)])
    for num_splits in (-1, 3, 16, 32):
        with pytest.raises(RuntimeError, match=f"num_splits: expected .* or 8, got {num_splits}"):
            batch.run(num_splits=num_splits)
    with pytest.raises(
        RuntimeError, match=r"output: expected shape \[2, 4, 64\], got \[2, 4, 32\]"
    ):
        batch.run(output=torch.empty(2, 4, 32))
    with pytest.raises(RuntimeError, match=r"sinks: expected shape \[4\], got \[5\]"):
        batch.run(sinks=torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"query_start_loc: expected shape \[2\]"):
        batch.query_start_loc = batch.query_start_loc[:1]
        batch.run()
    batch = make_batch([(2, 300)])
    with pytest.raises(RuntimeError, match="value_cache: expected float32 or float8_e4m3fn"):
        batch.value_cache = batch.value_cache.half()
        batch.run()
    with pytest.raises(RuntimeError, match="multiple of key_cache's, got 4 and 3"):
        make_batch([(2, 300)], heads=(4, 3)).run()
    with pytest.raises(RuntimeError, match="multiple of 8 up to 256, got 36"):
        make_batch([(2, 300)], head_dim=36).run()


def test_paged_attention_opcheck():
    batch = make_batch([(2, 30)])
    args = (*batch.args(), -1, -1, None, None, None, 0, torch.empty_like(batch.query))
    check_op(torch.ops.dflash.paged_attention.default, args)


@pytest.mark.gpu
def test_paged_attention_refuses_other_head_dims_on_cuda():
    with pytest.raises(RuntimeError, match="expected head_dim 64, 96, 128 or 256, got 72"):
        make_batch([(2, 30)], torch.float16, "cuda", head_dim=72).run()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_len", [1, 16])
def test_paged_attention_splits_are_bitwise_repeatable(dtype, query_len):
    lens = [(query_len, 3000), (query_len, 77), (query_len, 0)]
    batch = make_batch(lens, dtype, "cuda", heads=(8, 2), head_dim=128)
    first = batch.run()
    assert_close(first, batch.expected())
    output = torch.empty_like(first)
    for i in range(1000):
        output.fill_(NAN if i % 2 else i)
        assert torch.equal(batch.run(output=output), first), f"repeat {i}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_long_context(dtype):
    lens = [(16, 32768), (1, 32001), (5, 3)]
    batch = make_batch(lens, dtype, "cuda", heads=(4, 1), head_dim=128, causal=False)
    batch.check(2 * RELATIVE_ERROR[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_attention_graph_replays_at_other_lengths(dtype):
    captured = make_batch([(16, 2000), (16, 2000)], dtype, "cuda", heads=(8, 2), head_dim=128)
    output = torch.zeros_like(captured.query)
    captured.run(output=output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(output=output)
    for i, lens in enumerate([[(16, 16), (16, 1999)], [(16, 700), (3, 0)], [(1, 65), (16, 128)]]):
        # Built at the captured length, so that tables and caches have the captured shapes.
        lens_of_cache = [(query_len, 2000) for query_len, _ in lens]
        other = make_batch(lens_of_cache, dtype, "cuda", heads=(8, 2), head_dim=128, seed=i)
        other.seq_lens.copy_(torch.tensor([seq_len for _, seq_len in lens]))
        for name in ("query", "key_cache", "value_cache", "block_table", "seq_lens"):
            source = getattr(other, name)
            getattr(captured, name)[: source.shape[0]].copy_(source)
        captured.query_start_loc.copy_(other.query_start_loc)
        output.zero_()
        graph.replay()
        assert_close(output, captured.expected())
