# SPDX-License-Identifier: Apache-2.0
"""Every backend against the sdpa oracle, and the graphs it may stand in, at bf16 on a GPU."""

from dataclasses import replace

import pytest
import torch
from benchmarks.shapes import RandomWeights, qwen3_8b

from dflash.attention import flashinfer, select
from dflash.attention.select import choose_backend
from dflash.attention.spec import CaptureLimits, Refusal
from dflash.models.decoder import DecoderSettings, arch_of
from dflash.models.target import Target
from tests.attention.batches import SPEC, Pool, worst_row

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2
BACKENDS = ("native", "flash_attn", "flashinfer", "flashinfer_split", "flashinfer_fa3")
REPLAYABLE = ("native", "flash_attn", "flashinfer")
CONTEXTS = (1, 2, 17, 100, 1000, 4097, 32768)
LONGEST, MAX_REQS = CONTEXTS[-1] + 16, len(CONTEXTS) + 1


def _spec(**change):
    spec = replace(
        SPEC, arch=arch_of(torch.device("cuda")), dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
        head_dim=128, num_heads=4, num_kv_heads=1,
    )  # fmt: skip
    return replace(spec, **change)


def _make(name, spec):
    """The backend, or a skip that says what this machine lacks."""
    row = next(backend for backend in select.BACKENDS if backend.name == name)
    reason = row.missing()
    if reason is not None:
        pytest.skip(reason)
    answer = choose_backend(spec).answers[name]
    if isinstance(answer, Refusal):
        pytest.skip(f"refused: {answer.reason}")
    return row.make(spec, torch.device("cuda"))


def _attend(backend, pool, lens):
    query, batch = pool.batch(lens)
    backend.prepare(batch)
    output = backend.forward(query, pool.cache, batch, None)
    return worst_row(output, pool.expected(query, batch))


@pytest.fixture(scope="module")
def pools():
    """One pool of K/V heads' width, for all specs that share it."""
    return {}


def _pool(pools, spec, max_reqs=MAX_REQS, max_seq_len=LONGEST):
    key = (spec.num_kv_heads, spec.head_dim, spec.kv_block_size, max_reqs, max_seq_len)
    if key not in pools:
        pools[key] = Pool(spec, max_reqs, max_seq_len, "cuda")
    pools[key].spec = spec
    return pools[key]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("ratio", range(1, 9))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 300])
def test_equals_the_oracle(pools, name, ratio, causal, window):
    spec = _spec(num_heads=ratio, causal=causal, window=window)
    backend, pool = _make(name, spec), _pool(pools, spec)
    decode = [(16, context + 15) for context in CONTEXTS] + [(16, 0)]
    one = [(1, context) for context in CONTEXTS]
    prompts = [(1, 32768), (77, 4097), (700, 700), (16, 1000), (1, 1)]
    errors = {
        shape: _attend(backend, pool, lens)
        for shape, lens in (("decode", decode), ("one", one), ("prompts", prompts))
    }
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("page", [1, 16, 48])
def test_page_sizes(pools, name, page):
    spec = _spec(kv_block_size=page, num_kv_heads=2)
    lens = [(16, 700), (16, 0), (16, 33), (16, 48)]
    assert _attend(_make(name, spec), _pool(pools, spec, 4, 704), lens) < TOLERANCE


def _capture(backend, query, batch, cache):
    output = torch.zeros_like(query)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output.copy_(backend.forward(query, cache, batch, None))
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        output.copy_(backend.forward(query, cache, batch, None))
    return graph, output


def _refill(query, batch, other_query, other):
    """Puts another batch where a graph reads."""
    query.copy_(other_query)
    batch.block_table.copy_(other.block_table)
    batch.seq_lens.copy_(other.seq_lens)


@pytest.mark.parametrize("name", REPLAYABLE)
@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), (True, 300), (False, 300)]
)
def test_a_graph_replays_at_200_other_lengths(pools, name, causal, window):
    """Requests join and leave between replays, and most are fewer than the bucket."""
    reqs, rows, longest = 8, 16, 6000
    spec = _spec(causal=causal, window=window)
    backend, pool = _make(name, spec), _pool(pools, spec, reqs, longest)
    backend.init_capture(CaptureLimits(reqs, reqs * rows, rows, longest, pool.columns))
    query, batch = pool.batch([(rows, 500)] * reqs)
    backend.prepare_capture(batch)
    graph, output = _capture(backend, query, batch, pool.cache)
    generator = torch.Generator().manual_seed(1)
    worst = 0.0
    for i in range(200):
        lens = torch.randint(rows, longest + 1, (reqs,), generator=generator)
        lens[torch.rand(reqs, generator=generator) < 0.3] = 0
        lens[int(torch.randint(1, reqs + 1, (1,), generator=generator)) :] = 0
        if i % 5 == 0:
            pool.shuffle(reqs)
        other_query, other = pool.batch([(rows, int(n)) for n in lens])
        _refill(query, batch, other_query, other)
        backend.prepare_replay(batch)
        graph.replay()
        if lens.any():
            worst = max(worst, worst_row(output, pool.expected(query, batch)))
        backend.prepare(batch)
        eager = backend.forward(query, pool.cache, batch, None)
        assert torch.equal(output, eager), f"replay {i} at {lens.tolist()} is not the eager forward"
    assert worst < TOLERANCE


def _replayed_with_a_stale_plan(pools, name, planned, seq_len):
    """Errors of a graph at the length its plan was made for, and at another one with the CSR of that one."""
    spec = _spec()
    backend, pool = _make(name, spec), _pool(pools, spec, 2, 6000)
    query, batch = pool.batch([(16, planned)] * 2)
    backend.prepare(batch)
    graph, output = _capture(backend, query, batch, pool.cache)
    graph.replay()
    at_home = worst_row(output, pool.expected(query, batch))
    _refill(query, batch, *pool.batch([(16, seq_len)] * 2))
    fresh = _make(name, spec)
    fresh.prepare(batch)
    for part in ("_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"):
        stale, new = (getattr(b._planned.inner, part) for b in (backend, fresh))
        stale.as_strided(new.shape, (1,)).copy_(new)
    graph.replay()
    return at_home, worst_row(output, pool.expected(query, batch))


@pytest.mark.parametrize(
    ("name", "planned", "seq_len"),
    [
        ("flashinfer_fa3", 3000, 700),
        ("flashinfer_fa3", 700, 3000),
        ("flashinfer_split", 3000, 700),
        ("flashinfer_split", 700, 3000),
    ],
)
def test_a_plan_that_is_refused_is_wrong_when_replayed(pools, name, planned, seq_len):
    """FA3 keeps the planned lengths, split-KV the chunks of them: too many for less, too few for more."""
    at_home, elsewhere = _replayed_with_a_stale_plan(pools, name, planned, seq_len)
    assert at_home < TOLERANCE and elsewhere > 10 * TOLERANCE
    support = choose_backend(_spec(), name).support
    assert not support.replayable and not support.in_one_graph and support.reason


def test_a_fixed_plan_uses_nothing_it_does_not_write(pools, monkeypatch):
    """What a plan leaves unwritten is poison: request ids far outside the batch."""
    spec = _spec()
    backend, pool = _make("flashinfer", spec), _pool(pools, spec, 8, 6000)
    plan = flashinfer._Wrapper.plan

    def poisoned(self, *args, **options):
        for name in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
            getattr(self.inner, name).fill_(0x5F)
        plan(self, *args, **options)

    monkeypatch.setattr(flashinfer._Wrapper, "plan", poisoned)
    for reqs in (1, 3, 8):
        assert _attend(backend, pool, [(16, 2000 + r) for r in range(reqs)]) < TOLERANCE


def test_a_model_on_flashinfer_is_the_model_on_native():
    """A prompt, then a verify batch over its cache, through two layers of a Qwen3-8B shape."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    _make("flashinfer", _spec())
    shape = qwen3_8b()
    config = replace(
        shape, decoder=replace(shape.decoder, num_layers=2, layers=shape.decoder.layers[:2])
    )
    weights = RandomWeights(dtype, device).target(config)
    hidden = {}
    for name in ("native", "flashinfer"):
        settings = DecoderSettings(device, dtype, dtype, 16, 1024, name)
        target = Target(config, weights, settings)
        target.decoder.allocate_cache(130, 16)
        pool = Pool(_spec(num_heads=1), 2, 1024, "cuda")
        hidden[name] = []
        for lens in ([(300, 300), (77, 77)], [(16, 316), (16, 93)]):
            _, batch = pool.batch(lens)
            places = [
                (table[p // 16] * 16 + p % 16, p)
                for table, (q, n) in zip(batch.block_table.tolist(), lens, strict=True)
                for p in range(n - q, n)
            ]
            batch.slot_mapping, batch.positions = torch.tensor(places, device=device).T.contiguous()
            ids = torch.arange(len(places), device=device) * 37 % 1000
            target.decoder.prepare(batch)
            hidden[name].append(target.forward(ids, batch))
    for ours, theirs in zip(hidden["native"], hidden["flashinfer"], strict=True):
        assert worst_row(theirs, ours) < 2 * TOLERANCE
