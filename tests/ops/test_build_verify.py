# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.ops.build_verify import build_verify, build_verify_reference

from .batches import (
    assert_fields_equal,
    guarded_like,
    int32,
    int64,
    integers,
    on,
    poisoned_like,
    random_block_table,
    random_idx_mapping,
)
from .support import DEVICES, check_op


def verify_rows(device, **batch):
    """The op's outputs in fresh buffers, shaped by the reference."""
    rows = poisoned_like(build_verify_reference(**batch), device)
    build_verify(**on(device, batch), **rows._asdict())
    return rows


def random_batch(rng, num_reqs, num_live, num_draft, kv_block_size, max_model_len, num_columns):
    num_states = num_reqs + 2
    return {
        "idx_mapping": random_idx_mapping(rng, num_reqs, num_live, num_states),
        "seq_lens": integers(rng, 0, max_model_len, num_states).int(),
        "last_sampled": integers(rng, 0, 50000, num_states),
        "draft_tokens": integers(rng, -1, 50000, num_states, num_draft),
        "block_table": random_block_table(rng, num_reqs, num_columns),
        "kv_block_size": kv_block_size,
        "max_model_len": max_model_len,
    }


@pytest.mark.parametrize("device", DEVICES)
def test_build_verify_vector(device):
    rows = verify_rows(
        device,
        idx_mapping=int32([2, 0, -1]),
        seq_lens=int32([6, 0, 3]),
        last_sampled=int64([70, -5, 99]),
        draft_tokens=int64([[71, -1], [-5, -5], [11, 12]]),
        block_table=int32([[5, 6], [7, 0], [8, 9]]),
        kv_block_size=4,
        max_model_len=100,
    )
    assert rows.input_ids.tolist() == [99, 11, 12, 70, 71, 0, 0, 0, 0]
    assert rows.positions.tolist() == [3, 4, 5, 6, 7, 8, 0, 0, 0]
    # Request 1: block 1 is the null block, and position 8 is past the table.
    assert rows.slot_mapping.tolist() == [23, 24, 25, -1, -1, -1, -1, -1, -1]
    assert rows.query_seq_lens.tolist() == [6, 9, 0]
    assert rows.query_start_loc.tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_draft", [0, 1, 7, 15])
@pytest.mark.parametrize("kv_block_size", [1, 16])
def test_build_verify_equals_reference(device, num_draft, kv_block_size):
    rng = torch.Generator().manual_seed(0)
    for num_reqs, num_live in [(1, 1), (4, 0), (5, 3), (33, 33), (300, 257)]:
        batch = random_batch(rng, num_reqs, num_live, num_draft, kv_block_size, 100, 7)
        expected = build_verify_reference(**batch)
        rows, check_guards = guarded_like(expected, device)
        build_verify(**on(device, batch), **rows._asdict())
        assert_fields_equal(rows, expected)
        check_guards()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(0, 6),
    num_padded=st.integers(0, 6),
    num_draft=st.integers(0, 9),
    kv_block_size=st.sampled_from([1, 2, 3, 16]),
    max_model_len=st.integers(1, 40),
    num_columns=st.integers(0, 8),
)
def test_build_verify_property(
    device, seed, num_reqs, num_padded, num_draft, kv_block_size, max_model_len, num_columns
):
    rng = torch.Generator().manual_seed(seed)
    num_live = max(0, num_reqs - num_padded)
    sizes = (num_draft, kv_block_size, max_model_len, num_columns)
    batch = random_batch(rng, num_reqs, num_live, *sizes)
    assert_fields_equal(verify_rows(device, **batch), build_verify_reference(**batch))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_block_size", [1, 16])
def test_slots_follow_the_table_over_block_edges(device, kv_block_size):
    """Every draft accepted, step after step (trap 4): slots are those of consecutive positions."""
    num_draft, num_steps = 4, 12
    num_columns = -(-64 // kv_block_size)
    table = torch.arange(num_columns, 0, -1, dtype=torch.int32)[None]
    for s in range(0, num_steps * (num_draft + 1), num_draft + 1):
        rows = verify_rows(
            device,
            idx_mapping=int32([0]),
            seq_lens=int32([s]),
            last_sampled=int64([1]),
            draft_tokens=int64([[2] * num_draft]),
            block_table=table,
            kv_block_size=kv_block_size,
            max_model_len=64,
        )
        expected = [
            (num_columns - p // kv_block_size) * kv_block_size + p % kv_block_size
            for p in range(s, s + num_draft + 1)
        ]
        assert rows.slot_mapping.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_padded_rows_are_inert(device):
    """A padded request reads and writes nothing, whatever the block table says (trap 6)."""
    rows = verify_rows(
        device,
        idx_mapping=int32([-1, -1]),
        seq_lens=int32([9]),
        last_sampled=int64([9]),
        draft_tokens=int64([[9]]),
        block_table=int32([[3], [4]]),
        kv_block_size=16,
        max_model_len=16,
    )
    assert rows.input_ids.tolist() == rows.positions.tolist() == [0] * 4
    assert rows.slot_mapping.tolist() == [-1] * 4
    assert rows.query_seq_lens.tolist() == [0, 0]
    assert rows.query_start_loc.tolist() == [0, 2, 4]


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_that_crosses_max_model_len(device):
    """Clamped positions, slots -1, and a causal length that is not clamped (traps 11, 12)."""
    rows = verify_rows(
        device,
        idx_mapping=int32([0, 1]),
        seq_lens=int32([14, 15]),
        last_sampled=int64([1, 1]),
        draft_tokens=int64([[2, 3, 4], [2, 3, 4]]),
        block_table=int32([[1, 2], [3, 4]]),  # the table is longer than max_model_len
        kv_block_size=10,
        max_model_len=16,
    )
    assert rows.positions.tolist() == [14, 15, 15, 15, 15, 15, 15, 15]
    assert rows.slot_mapping.tolist() == [24, 25, -1, -1, 45, -1, -1, -1]
    assert rows.query_seq_lens.tolist() == [18, 19]


@pytest.mark.parametrize("device", DEVICES)
def test_one_token_prompts(device):
    """s = 0: the bonus is the only prompt token (trap 25)."""
    rows = verify_rows(
        device,
        idx_mapping=int32([0]),
        seq_lens=int32([0]),
        last_sampled=int64([42]),
        draft_tokens=torch.empty(1, 0, dtype=torch.int64),
        block_table=int32([[1]]),
        kv_block_size=1,
        max_model_len=1,
    )
    assert (rows.input_ids.tolist(), rows.positions.tolist()) == ([42], [0])
    assert (rows.slot_mapping.tolist(), rows.query_seq_lens.tolist()) == ([1], [1])


@pytest.mark.parametrize("device", DEVICES)
def test_build_verify_strided_and_empty(device):
    batch = random_batch(torch.Generator().manual_seed(1), 5, 4, 3, 4, 50, 6)
    expected = build_verify_reference(**batch)
    batch = on(device, batch)
    for name in ("draft_tokens", "block_table"):
        wide = torch.cat([batch[name]] * 2, dim=1)
        batch[name] = wide[:, : batch[name].shape[1]]
        assert not batch[name].is_contiguous()
    rows = poisoned_like(expected, device)
    build_verify(**batch, **rows._asdict())
    assert_fields_equal(rows, expected)

    rows = verify_rows(device, **random_batch(torch.Generator(), 0, 0, 3, 4, 50, 6))
    assert rows.query_start_loc.tolist() == [0]
    assert rows.input_ids.numel() == rows.query_seq_lens.numel() == 0


@pytest.mark.parametrize(
    "change,message",
    [
        ({"seq_lens": torch.zeros(7)}, "seq_lens: expected int32, got float32"),
        ({"last_sampled": int64([1])}, r"last_sampled: expected shape \[7\], got \[1\]"),
        ({"block_table": int32([[1]])}, r"block_table: expected shape \[5, \*\], got \[1, 1\]"),
        ({"kv_block_size": 0}, "kv_block_size: expected 1..2147483647, got 0"),
        ({"max_model_len": -1}, "max_model_len: expected 1..2147483647, got -1"),
        ({"idx_mapping": int32(range(10))[::2]}, "idx_mapping: the last dimension must be contig"),
        ({"input_ids": int64([0])}, r"input_ids: expected shape \[20\], got \[1\]"),
    ],
)
def test_build_verify_refuses_bad_input(change, message):
    batch = random_batch(torch.Generator(), 5, 5, 3, 4, 50, 6)
    arguments = batch | build_verify_reference(**batch)._asdict() | change
    with pytest.raises(RuntimeError, match=message):
        build_verify(**arguments)


def test_build_verify_opcheck():
    batch = random_batch(torch.Generator(), 3, 2, 3, 4, 50, 6)
    rows = poisoned_like(build_verify_reference(**batch), "cpu")
    check_op(torch.ops.dflash.build_verify.default, (*batch.values(), *rows))
