# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's plans and CSR without FlashInfer: what is planned when, and what is read at run time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.attention import flashinfer
from dflash.attention.flashinfer import Fa3FlashInfer, FlashInfer, SplitFlashInfer
from dflash.attention.paged_csr import PagedCsr
from dflash.attention.spec import AttentionBatch, CaptureLimits
from dflash.errors import DflashError
from tests.attention import fake_flashinfer
from tests.attention.batches import SPEC, Pool, worst_row

CPU = torch.device("cpu")
CAUSAL = replace(SPEC, causal=True)
WINDOW = replace(SPEC, causal=True, window=20)
UNIFORM = [(4, 100), (4, 0), (4, 4), (4, 33)]
RAGGED = [(1, 100), (7, 7), (100, 130), (3, 0), (16, 48)]


@pytest.fixture
def wrappers(monkeypatch):
    monkeypatch.setattr(flashinfer, "_workspace_bytes", lambda *_: 16)
    return fake_flashinfer.install(monkeypatch)


def _batch_of(table, seq_lens):
    return AttentionBatch(
        positions=torch.zeros(0, dtype=torch.int64),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_table=torch.tensor(table, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.zeros(len(seq_lens) + 1, dtype=torch.int32),
        max_query_len=0,
        max_seq_len=1 << 20,
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 5), reqs=st.integers(1, 5), blocks=st.integers(1, 6))
def test_csr_is_the_pages_that_each_sequence_reaches(data, size, reqs, blocks):
    lens = data.draw(st.lists(st.integers(0, blocks * size + 9), min_size=reqs, max_size=reqs))
    table = [[100 * r + c for c in range(blocks)] for r in range(reqs)]
    csr = PagedCsr(reqs + 2, blocks + 1, size, CPU)
    csr.build(_batch_of([[7] * blocks] * reqs, [blocks * size] * reqs))  # what was there before
    csr.build(_batch_of(table, lens))
    indptr, indices, last = csr.views(reqs, blocks)
    pages = [min(-(-n // size), blocks) for n in lens]
    assert indptr.tolist() == [sum(pages[:r]) for r in range(reqs + 1)]
    flat = [page for row, n in zip(table, pages, strict=True) for page in row[:n]]
    assert indices[: len(flat)].tolist() == flat
    for r, n in enumerate(lens):
        if n:
            assert last[r] == min(n, blocks * size) - (pages[r] - 1) * size
    assert csr.indices.numel() == (reqs + 2) * (blocks + 1) + 1


@pytest.mark.parametrize("make", [FlashInfer, SplitFlashInfer, Fa3FlashInfer])
@pytest.mark.parametrize("spec", [SPEC, CAUSAL, WINDOW])
@pytest.mark.parametrize("lens", [UNIFORM, RAGGED])
def test_equals_the_oracle(wrappers, make, spec, lens):
    pool, backend = Pool(spec, 5, 160), make(spec, CPU)
    for _ in range(3):
        query, batch = pool.batch(lens)
        backend.prepare(batch)
        output = backend.forward(query, pool.cache, batch, None)
        assert worst_row(output, pool.expected(query, batch)) < 1e-5
        pool.shuffle(5)


def test_a_decode_batch_is_planned_once_and_prompts_each_time(wrappers):
    pool, backend = Pool(SPEC, 5, 160), FlashInfer(SPEC, CPU)
    for lens in (UNIFORM, [(4, n + 1) for _, n in UNIFORM], RAGGED, RAGGED, UNIFORM):
        backend.prepare(pool.batch(lens)[1])
    assert sorted((w.backend, w.num_plans) for w in wrappers) == [("fa2", 1), ("fa3", 2)]


def test_long_queries_are_prompts_even_when_all_are_equally_long(wrappers):
    pool, backend = Pool(SPEC, 5, 160), FlashInfer(SPEC, CPU)
    for length in (64, 65, 66):
        backend.prepare(pool.batch([(length, 100)] * 2)[1])
    assert sorted((w.backend, w.num_plans) for w in wrappers) == [("fa2", 1), ("fa3", 2)]


def test_the_first_layer_builds_the_csr_for_the_group(wrappers, monkeypatch):
    pool, backend = Pool(SPEC, 4, 160), FlashInfer(SPEC, CPU)
    builds = []
    build = PagedCsr.build
    monkeypatch.setattr(PagedCsr, "build", lambda self, b: (builds.append(b), build(self, b)))
    layers = [replace(pool.cache) for _ in range(3)]
    query, batch = pool.batch(UNIFORM)
    backend.prepare(batch)
    for _ in range(
        2
    ):  # a second forward of the same batch builds again, as a capture after a warm-up must
        for cache in layers:
            backend.forward(query, cache, batch, None)
    assert builds == [batch, batch]


def test_capture_buffers_stay_where_they_are(wrappers):
    pool, backend = Pool(SPEC, 4, 160), FlashInfer(SPEC, CPU)
    with pytest.raises(RuntimeError, match="init_capture comes before"):
        backend.prepare_capture(pool.batch(UNIFORM)[1])
    backend.init_capture(CaptureLimits(4, 16, 4, 160, pool.columns))
    addresses = set()
    for reqs in (4, 2, 1):
        query, batch = pool.batch(UNIFORM[:reqs])
        backend.prepare_capture(batch)
        assert (
            worst_row(backend.forward(query, pool.cache, batch, None), pool.expected(query, batch))
            < 1e-5
        )
        addresses.add(wrappers[-1]._paged_kv_indptr_buf.data_ptr())
    larger = Pool(SPEC, 6, 160)
    backend.prepare(larger.batch([(4, 50)] * 6)[1])
    outside = wrappers[-1]._paged_kv_indptr_buf.data_ptr()
    assert len(addresses) == 1 and outside not in addresses
    with pytest.raises(ValueError, match="one query length"):
        backend.prepare_capture(pool.batch(RAGGED[:4])[1])


def test_a_forward_without_its_plan_is_refused(wrappers):
    pool, backend = Pool(SPEC, 5, 160), FlashInfer(SPEC, CPU)
    for lens in (UNIFORM, RAGGED):
        query, batch = pool.batch(lens)
        with pytest.raises(RuntimeError, match="prepare"):
            backend.forward(query, pool.cache, batch, None)
    _, planned = pool.batch(RAGGED)
    backend.prepare(planned)
    query, other = pool.batch(RAGGED)
    with pytest.raises(RuntimeError, match="prepare"):
        backend.forward(query, pool.cache, other, None)


def test_a_flashinfer_that_copies_the_csr_is_refused(monkeypatch):
    monkeypatch.setattr(flashinfer, "_workspace_bytes", lambda *_: 16)
    fake_flashinfer.install(monkeypatch, copies=True)
    pool, backend = Pool(SPEC, 4, 160), FlashInfer(SPEC, CPU)
    with pytest.raises(DflashError, match="copies paged_kv_indptr_buf"):
        backend.prepare(pool.batch(UNIFORM)[1])
