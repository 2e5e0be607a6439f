# SPDX-License-Identifier: Apache-2.0
"""What batches are padded to, and how prompts are laid out there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash.attention.spec import Support
from dflash.engine.args import EngineArgs
from dflash.engine.buckets import (
    PromptBucket,
    find_prompt_bucket,
    prompt_buckets,
    request_buckets,
    request_multiple,
)
from dflash.engine.buffers import BatchBuffers
from dflash.engine.graphs import choose_prompt_buckets
from dflash.engine.memory import GRAPH_BYTES, profile_memory
from dflash.engine.request import PrefillChunk, Request
from dflash.engine.sampling_params import SamplingParams
from dflash.models.decoder import Decoder
from tests.support.engine import make_llm

BLOCK = 4


def sizes(buckets: list[PromptBucket]) -> list[tuple[int, int]]:
    return [(bucket.num_rows, bucket.num_reqs) for bucket in buckets]


def test_iterations():
    assert request_buckets(1) == [1]
    assert request_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert request_buckets(3, request_multiple(16, 128)) == [8]
    assert request_buckets(20, request_multiple(16, 128)) == [8, 16, 24]


@pytest.mark.parametrize(
    ("max_rows", "max_reqs", "tile_rows", "rows", "reqs"),
    [
        (2048, 32, None, [128, 256, 512], [1, 8]),
        (2048, 4, None, [128, 256, 512], [1, 4]),
        (2048, 1, None, [128, 256, 512], [1]),
        (200, 8, None, [128, 200], [1, 8]),
        (5, 8, None, [5], [1, 8]),
        (2048, 8, 128, [128, 256, 512], [1, 8]),
        (130, 8, 128, [128, 256], [1, 8]),
        (17, 8, 128, [128], [1, 8]),
    ],
)
def test_prompts(max_rows, max_reqs, tile_rows, rows, reqs):
    expected = [(n, r) for n in rows for r in reqs]
    assert sizes(prompt_buckets(max_rows, max_reqs, tile_rows)) == expected


@pytest.mark.parametrize(
    ("num_rows", "num_reqs", "expected"),
    [
        (1, 1, (128, 1)),
        (128, 1, (128, 1)),
        (129, 1, (256, 1)),
        (128, 2, (128, 8)),
        (129, 8, (256, 8)),
        (512, 1, (512, 1)),
        (512, 9, None),
        (513, 1, None),
    ],
)
def test_the_smallest_bucket_that_holds_them(num_rows, num_reqs, expected):
    found = find_prompt_bucket(prompt_buckets(2048, 32), num_rows, num_reqs)
    assert (found and (found.num_rows, found.num_reqs)) == expected


def make_buffers(tile_rows: int | None = None) -> BatchBuffers:
    """Poisoned: what a batch leaves as it was shows."""
    buffers = BatchBuffers(6, 32, 8, 3, BLOCK, torch.device("cpu"), tile_rows)
    for value in vars(buffers).values():
        if isinstance(value, torch.Tensor):
            value.fill_(99)
    return buffers


def chunk(row: int, prompt_len: int, start: int = 0, resumed: bool = False) -> PrefillChunk:
    """From `start` to the end of a prompt of 100 * row, 100 * row + 1, ... in blocks 10 * row, ..."""
    prompt = [100 * row + i for i in range(prompt_len)]
    request = Request(row, prompt, SamplingParams(), 9, 0, row=row)
    request.blocks = [10 * row + i for i in range(8)]
    if resumed:
        request.output_token_ids = [7]
    return PrefillChunk(request, start, prompt_len - start)


def test_a_padded_batch():
    """A prompt, one that begins in the prefix cache, one that is resumed; then rows and requests of nobody."""
    buffers = make_buffers()
    chunks = [chunk(2, 5), chunk(1, 10, start=8), chunk(3, 2, resumed=True)]
    batch = buffers.prefill(chunks, PromptBucket(16, 5))
    assert (batch.num_rows, batch.num_reqs, batch.max_query_len) == (16, 5, 16)
    assert batch.idx_mapping.tolist() == [2, 1, 3, -1, -1]
    assert batch.query_start_loc.tolist() == [0, 5, 7, 9, 9, 9]
    assert batch.seq_lens.tolist() == [5, 10, 2, 0, 0]
    assert batch.input_ids.tolist() == [*range(200, 205), 108, 109, 300, 301, *[0] * 7]
    assert batch.positions.tolist() == [*range(5), 8, 9, 0, 1, *[0] * 7]
    slots = [*range(80, 85), 12 * BLOCK, 12 * BLOCK + 1, 120, 121]
    assert batch.slot_mapping.tolist() == slots + [-1] * 7
    assert batch.logits_rows.tolist() == [4, 6, 0, 0, 0]
    assert batch.logits_reqs.tolist() == [0, 1, 0, 0, 0]
    assert batch.logits_start_loc.tolist() == [0, 1, 2, 2, 2, 2]
    assert batch.block_table[3:].eq(0).all()
    assert batch.variant.drafts


def test_a_batch_without_a_bucket_is_as_long_as_it_is():
    batch = make_buffers().prefill([chunk(2, 5), chunk(1, 3)])
    assert (batch.num_rows, batch.num_reqs, batch.max_query_len) == (8, 2, 5)
    assert batch.query_start_loc.tolist() == [0, 5, 8]
    assert batch.logits_start_loc.tolist() == [0, 1, 2]
    assert batch.logits_rows.tolist() == [4, 7]


def test_tiles_are_filled_with_rows_of_nobody():
    """Also those of logits. Were the longest query 6 here, the batch would look like two of 6 rows."""
    batch = make_buffers(tile_rows=6).prefill([chunk(2, 5), chunk(1, 3)])
    assert (batch.num_rows, batch.num_reqs, batch.max_query_len) == (12, 2, 12)
    assert batch.query_start_loc.tolist() == [0, 5, 8]
    assert batch.slot_mapping[8:].tolist() == [-1] * 4
    assert batch.logits_rows.tolist() == [4, 7, 0, 0, 0, 0]
    assert batch.logits_start_loc.tolist() == [0, 1, 2]


def decoder_with(support: Support, query_shape: str = "ragged") -> Decoder:
    decoder = Decoder.__new__(Decoder)
    decoder.query_shape, decoder.support = query_shape, {"group": support}
    decoder.backend_names = {"group": "planned"}
    return decoder


def test_where_prompts_are_captured():
    args, cuda = EngineArgs("m"), torch.device("cuda")
    every, uniform = Support(True, True, ragged=True), Support(True, True)
    host = Support(False, False, "it plans")

    def chosen(*decoders: Decoder, device=cuda) -> bool:
        return bool(choose_prompt_buckets(args, device, decoders, None))

    assert chosen(decoder_with(every))
    assert not chosen(decoder_with(every), device=torch.device("cpu"))
    assert not chosen(decoder_with(uniform)) and not chosen(decoder_with(host))
    # A small model reads prompts, too; a DFlash drafter only blocks.
    assert not chosen(decoder_with(every), decoder_with(uniform))
    assert chosen(decoder_with(every), decoder_with(uniform, "uniform"))
    assert "planned: it plans" in decoder_with(host).prompts_eager_reason


def test_graphs_of_prompts_are_counted(target, draft, monkeypatch):
    llm = make_llm(target, draft, max_model_len=64)
    step, cuda = llm.core._step, SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 8 << 30))

    def graphs(buckets: list[PromptBucket]) -> int:
        profile = profile_memory(llm.args, cuda, step.target, step.speculator, [], 64, 4, buckets)
        return profile.graphs

    plain = graphs([])
    assert graphs([PromptBucket(8, 1)]) == plain + GRAPH_BYTES
    rows = 8 * 4  # of the largest iteration
    few, many = graphs([PromptBucket(rows, 1)]), graphs([PromptBucket(rows + 100, 1)])
    assert few < many


def test_backends_say_whether_they_replay_prompts():
    """`native` alone does."""
    from dflash.attention import flash_attn, flashinfer, native
    from dflash.attention.spec import AttentionSpec

    spec = AttentionSpec(
        "sm_90", 2, 1, 64, torch.bfloat16, torch.bfloat16, True, None, "ragged", 16
    )
    supports = {b.__name__: b.supports(spec) for b in (native, flash_attn, flashinfer)}
    assert all(support.replayable for support in supports.values())
    assert [name for name, support in supports.items() if support.ragged] == [native.__name__]
