# SPDX-License-Identifier: Apache-2.0
"""Input preparation under vLLM 0.26, on buffers of its shapes and dtypes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dflash.integrations.vllm import inputs
from dflash.log import _seen
from dflash.ops.build_query import build_query_reference
from tests.ops.support import DEVICES

MAX_REQS, MAX_TOKENS, MAX_LEN, MASK, BLOCK, UNTOUCHED = 4, 64, 40, 123, 16, -7
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dflash.speculator"


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def outputs(num_samples, device="cpu"):
    """vLLM's buffers, in the order of its arguments: sizes of the largest batch, ids in int32."""

    def buffer(size, dtype=torch.int64):
        return torch.full((size,), UNTOUCHED, dtype=dtype, device=device)

    buffers = SimpleNamespace(
        input_ids=buffer(MAX_TOKENS, torch.int32),
        positions=buffer(MAX_TOKENS),
        query_start_loc=buffer(MAX_REQS + 1, torch.int32),
        seq_lens=buffer(MAX_REQS, torch.int32),
    )
    return (
        buffers,
        *(buffer(MAX_TOKENS) for _ in range(3)),
        *(buffer(num_samples) for _ in range(2)),
        buffer(num_samples, torch.int32),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("anchor", [False, True])
def test_vllms_buffers_are_filled_and_padded_for_its_graphs(anchor, device):
    """A decoding request with two rejected rows, a chunk of a prompt, and two requests of padding."""
    num_query, num_draft = 3, 3 if anchor else 2
    # The target's graph had room for three requests and 12 rows: vLLM's views show the padding.
    batch = SimpleNamespace(
        num_reqs=2,
        num_tokens=7,
        positions=torch.tensor([17, 18, 19, 20, 5, 6, 7, 0, 0, 0, 0, 0]),
        query_start_loc=int32([0, 4, 7, 7]),
        idx_mapping=int32([2, 0]),
    )
    table = torch.zeros(MAX_REQS, 3, dtype=torch.int32)
    table[:2] = int32([[5, 6, 0], [7, 0, 0]])
    sampled, rejected = int32([1, 0]), int32([2, 0])
    last, following = torch.tensor([[1], [1], [99], [1]]), int32([55, 0, 0, 0])
    out = outputs(MAX_REQS * num_draft, device)
    moved = {
        name: value.to(device) for name, value in vars(batch).items() if torch.is_tensor(value)
    }
    on_device = SimpleNamespace(**(vars(batch) | moved))
    tensors = (x.to(device) for x in (sampled, rejected, last, following, table))

    inputs.with_build_query(lambda *args: None)(
        *out, on_device, *tensors, BLOCK, MASK, num_query, num_draft, MAX_REQS, MAX_TOKENS, MAX_LEN, anchor,
    )  # fmt: skip

    expected = build_query_reference(
        batch.positions[:7], batch.query_start_loc[:3], sampled, rejected, last.view(-1), following,
        batch.idx_mapping, [table[:2]], [BLOCK], num_draft, MASK, MAX_LEN, anchor, MAX_REQS,
    )  # fmt: skip
    buffers, query_slots, context_positions, context_slots, *samples = out
    rows = MAX_REQS * num_query
    assert buffers.input_ids[:6].tolist() == [99, MASK, MASK, 55, MASK, MASK]
    assert buffers.positions[:6].tolist() == [19, 20, 21, 8, 9, 10]
    assert context_slots[:7].tolist() == [97, 98, -1, -1, 117, 118, 119]
    for mine, theirs in (
        (buffers.input_ids[:rows], expected.query_input_ids.int()),
        (buffers.positions[:rows], expected.query_positions),
        (buffers.seq_lens, expected.query_seq_lens),
        (buffers.query_start_loc, expected.draft_query_start_loc),
        (query_slots[:rows], expected.query_slot_mappings[0]),
        (context_positions[:7], expected.context_positions),
        (context_slots[:7], expected.context_slot_mappings[0]),
        (samples[0], expected.sample_rows),
        (samples[1], expected.sample_positions),
        (samples[2], expected.sample_idx_mapping),
    ):
        assert torch.equal(mine.cpu(), theirs)
    assert buffers.seq_lens[2:].tolist() == [0, 0] and samples[2][2 * num_draft :].max() == -1
    for untouched in (buffers.input_ids[rows:], query_slots[rows:], context_slots[7:]):
        assert (untouched == UNTOUCHED).all()


def test_the_padding_ends_where_vllms_token_buffers_do(caplog):
    """max_num_seqs * Q above max_num_batched_tokens (trap 22): vLLM runs as many requests as fit."""
    out = outputs(100 * 15)
    batch = SimpleNamespace(
        num_reqs=1, num_tokens=1, positions=torch.tensor([3]), query_start_loc=int32([0, 1]), idx_mapping=int32([0]),
    )  # fmt: skip
    args = (
        *out, batch, int32([1]), int32([0]), torch.ones(100, 1).long(), int32([0] * 100),
        int32([[1, 2, 3]] * 100), BLOCK, MASK, 16, 15, 100, MAX_TOKENS, MAX_LEN,
    )  # fmt: skip
    seen = []
    prepare = inputs.with_build_query(lambda *args: seen.append(args))
    prepare(*args)
    assert out[0].positions.tolist() == [*range(4, 20), *[0] * 48]
    assert out[0].seq_lens.tolist() == [20, 0, 0, 0] and not seen
    batch.num_reqs = 5  # more than vLLM's buffers hold
    _seen.clear()
    with caplog.at_level("WARNING", "dflash"):
        prepare(*args)
    assert seen == [args] and "hold 4 of 16 rows; raise max_num_batched_tokens" in caplog.text


def test_vllms_function_is_replaced_once(monkeypatch):
    module = ModuleType(SPECULATOR)
    original = module.prepare_dflash_inputs = lambda: None
    parts = SPECULATOR.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules["vllm.v1.worker.gpu.spec_decode.dflash"].speculator = module
    monkeypatch.setitem(sys.modules, SPECULATOR, module)
    inputs.install()
    installed = module.prepare_dflash_inputs
    inputs.install()  # a second time in one process
    assert installed is module.prepare_dflash_inputs and installed.__wrapped__ is original
