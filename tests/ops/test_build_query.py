# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.ops.build_query import build_query, build_query_reference
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

MASK = 123


def query_rows(device, batch):
    """The op's outputs in fresh buffers, shaped by the reference."""
    rows = poisoned_like(build_query_reference(**batch), device)
    build_query(**on(device, batch), **rows._asdict())
    return rows


def one_request(positions, num_rejected, block_tables, kv_block_sizes, **changes):
    """One request in state row 1 of 2 whose bonus is 99."""
    batch = {
        "target_positions": int64(positions),
        "query_start_loc": int32([0, len(positions)]),
        "num_sampled": int32([1]),
        "num_rejected": int32([num_rejected]),
        "last_sampled": int64([-7, 99]),
        "next_prefill_tokens": int64([-7, 55]),
        "idx_mapping": int32([1]),
        "block_tables": [int32([row]) for row in block_tables],
        "kv_block_sizes": kv_block_sizes,
        "num_speculative_tokens": 2,
        "mask_token_id": MASK,
        "max_model_len": 100,
        "sample_from_anchor": False,
    }
    return batch | changes


def random_batch(
    rng, num_reqs, num_live, kv_block_sizes, num_draft, max_model_len, anchor, max_rows, num_tail
):
    """Ragged chunks (some empty) with random rejections; padding after the live ones; a tail."""
    num_states = num_reqs + 2
    lengths = integers(rng, 0, max_rows + 1, num_reqs)
    rejected = torch.minimum(lengths, integers(rng, 0, max_rows + 1, num_reqs))
    starts = integers(rng, 0, max_model_len, num_reqs)
    positions = [start + torch.arange(n) for start, n in zip(starts, lengths.tolist(), strict=True)]
    positions = torch.cat([*positions, integers(rng, 0, max_model_len, num_tail)])
    return {
        "target_positions": positions.clamp(max=max_model_len - 1).long(),
        "query_start_loc": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        "num_sampled": integers(rng, 0, 2, num_reqs).int(),
        "num_rejected": rejected.int(),
        "last_sampled": integers(rng, 0, 50000, num_states),
        "next_prefill_tokens": integers(rng, 0, 50000, num_states),
        "idx_mapping": random_idx_mapping(rng, num_reqs, num_live, num_states),
        "block_tables": [random_block_table(rng, num_reqs, 7) for _ in kv_block_sizes],
        "kv_block_sizes": kv_block_sizes,
        "num_speculative_tokens": num_draft,
        "mask_token_id": MASK,
        "max_model_len": max_model_len,
        "sample_from_anchor": anchor,
    }


@pytest.mark.parametrize("device", DEVICES)
def test_build_query_vector(device):
    """DESIGN section 5: rows 12 and 13 are rejected (trap 5)."""
    rows = query_rows(device, one_request([10, 11, 12, 13], 2, [[9, 3]], [10]))
    assert rows.context_positions.tolist() == [10, 11, 0, 0]
    assert rows.context_slot_mappings[0].tolist() == [30, 31, -1, -1]
    assert rows.query_input_ids.tolist() == [99, MASK, MASK]
    assert rows.query_positions.tolist() == [12, 13, 14]
    assert rows.query_slot_mappings[0].tolist() == [32, 33, 34]
    assert rows.query_seq_lens.tolist() == [15]
    assert rows.draft_query_start_loc.tolist() == [0, 3]
    assert rows.sample_rows.tolist() == [1, 2]
    assert rows.sample_positions.tolist() == [13, 14]
    assert rows.sample_idx_mapping.tolist() == [1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_build_query_from_the_anchor(device):
    """N rows, and each predicts the position after its own."""
    changes = {"sample_from_anchor": True}
    rows = query_rows(device, one_request([10, 11, 12, 13], 2, [[9, 3]], [10], **changes))
    assert rows.query_input_ids.tolist() == [99, MASK]
    assert rows.query_positions.tolist() == [12, 13]
    assert rows.query_seq_lens.tolist() == [14]
    assert rows.draft_query_start_loc.tolist() == [0, 2]
    assert rows.sample_rows.tolist() == [0, 1]
    assert rows.sample_positions.tolist() == [13, 14]


@pytest.mark.parametrize("device", DEVICES)
def test_the_bonus_of_a_partial_chunk_is_the_next_prompt_token(device):
    changes = {"num_sampled": int32([0])}
    rows = query_rows(device, one_request([10, 11], 0, [[9, 3]], [10], **changes))
    assert rows.query_input_ids.tolist() == [55, MASK, MASK]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("kv_block_sizes", [[1], [16], [16, 1, 5]])
def test_build_query_equals_reference(device, anchor, kv_block_sizes):
    rng = torch.Generator().manual_seed(0)
    for num_reqs, num_live, num_draft, max_rows, num_tail in [
        (1, 1, 1, 1, 0),
        (4, 0, 7, 8, 5),
        (5, 3, 15, 16, 3),
        (33, 33, 7, 100, 0),
        (300, 257, 15, 16, 130),
    ]:
        sizes = (kv_block_sizes, num_draft, 100, anchor, max_rows, num_tail)
        batch = random_batch(rng, num_reqs, num_live, *sizes)
        expected = build_query_reference(**batch)
        rows, check_guards = guarded_like(expected, device)
        build_query(**on(device, batch), **rows._asdict())
        assert_fields_equal(rows, expected)
        check_guards()


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(0, 6),
    num_padded=st.integers(0, 6),
    kv_block_sizes=st.lists(st.sampled_from([1, 2, 3, 16]), min_size=1, max_size=8),
    num_draft=st.integers(1, 9),
    max_model_len=st.integers(1, 40),
    anchor=st.booleans(),
    max_rows=st.integers(0, 12),
    num_tail=st.integers(0, 5),
)
def test_build_query_property(device, seed, num_reqs, num_padded, **sizes):
    rng = torch.Generator().manual_seed(seed)
    batch = random_batch(rng, num_reqs, max(0, num_reqs - num_padded), **sizes)
    assert_fields_equal(query_rows(device, batch), build_query_reference(**batch))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_block_size", [1, 16])
@pytest.mark.parametrize("num_accepted", [0, 2, 4])
def test_verify_and_query_agree_on_slots(device, kv_block_size, num_accepted):
    """Over block edges (trap 4): the features of a row go to the slot of its target K/V."""
    num_draft, num_columns, s = 4, -(-64 // kv_block_size), 0
    table = torch.arange(num_columns, 0, -1, dtype=torch.int32)[None]
    while s + 2 * (num_draft + 1) <= 64:
        verify = {
            "idx_mapping": int32([0]),
            "seq_lens": int32([s]),
            "last_sampled": int64([1]),
            "draft_tokens": int64([[2] * num_draft]),
            "block_table": table,
            "kv_block_size": kv_block_size,
            "max_model_len": 64,
        }
        verified = poisoned_like(build_verify_reference(**verify), device)
        build_verify(**on(device, verify), **verified._asdict())
        batch = one_request(verified.positions.tolist(), num_draft - num_accepted, [], [])
        batch |= {
            "num_sampled": int32([num_accepted + 1]),
            "block_tables": [table],
            "kv_block_sizes": [kv_block_size],
            "num_speculative_tokens": num_draft,
            "max_model_len": 64,
        }
        rows = query_rows(device, batch)
        kept = num_accepted + 1
        context_slots = rows.context_slot_mappings[0].tolist()
        assert context_slots[:kept] == verified.slot_mapping[:kept].tolist()
        assert context_slots[kept:] == [-1] * (num_draft - num_accepted)
        s += kept
        block = range(s, s + num_draft + 1)
        assert rows.query_positions.tolist() == list(block)
        assert rows.query_slot_mappings[0].tolist() == [
            (num_columns - p // kv_block_size) * kv_block_size + p % kv_block_size for p in block
        ]


@pytest.mark.parametrize("device", DEVICES)
def test_padding_and_tail_of_a_bucket(device):
    """A live request, two padded ones and 3 rows past the last offset (trap 6)."""
    batch = one_request([4, 5, 6, 7, 9, 9, 9], 1, [[9, 3]], [10])
    batch |= {
        "query_start_loc": int32([0, 2, 4, 4]),
        "num_sampled": int32([1, 5, 5]),
        "num_rejected": int32([1, 0, 0]),
        "idx_mapping": int32([1, -1, -1]),
        "block_tables": [int32([[1, 2], [3, 4], [5, 6]])],
    }
    rows = query_rows(device, batch)
    assert rows.context_positions.tolist() == [4, 0, 0, 0, 0, 0, 0]
    assert rows.context_slot_mappings[0].tolist() == [14, -1, -1, -1, -1, -1, -1]
    assert rows.query_input_ids.tolist() == [99, MASK, MASK] + [0] * 6
    assert rows.query_positions.tolist() == [5, 6, 7] + [0] * 6
    assert rows.query_slot_mappings[0].tolist() == [15, 16, 17] + [-1] * 6
    assert rows.query_seq_lens.tolist() == [8, 0, 0]
    assert rows.draft_query_start_loc.tolist() == [0, 3, 6, 9]
    assert rows.sample_rows.tolist() == [1, 2, 4, 5, 7, 8]
    assert rows.sample_positions.tolist() == [6, 7, 0, 0, 0, 0]
    assert rows.sample_idx_mapping.tolist() == [1, 1, -1, -1, -1, -1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("num_padded", [0, 1, 123])
def test_outputs_with_room_for_more_requests_and_int32_ids(device, num_padded, anchor):
    """A runtime with one size of buffers and ids in int32 copies nothing."""
    sizes = ([16, 1], 7, 100, anchor, 12, 3)
    for num_reqs in (0, 5):
        batch = random_batch(torch.Generator().manual_seed(2), num_reqs, num_reqs, *sizes)
        batch["next_prefill_tokens"] = batch["next_prefill_tokens"].int()
        expected = build_query_reference(**batch, num_output_reqs=num_reqs + num_padded)
        expected = expected._replace(query_input_ids=expected.query_input_ids.int())
        rows, check_guards = guarded_like(expected, device)
        build_query(**on(device, batch), **rows._asdict())
        assert_fields_equal(rows, expected)
        check_guards()
        assert rows.query_seq_lens[num_reqs:].tolist() == [0] * num_padded


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_for_fewer_requests_are_refused(device):
    batch = one_request([10, 11], 0, [[9, 3]], [10])
    rows = poisoned_like(build_query_reference(**batch), device)
    rows = rows._replace(query_seq_lens=rows.query_seq_lens[:0])
    with pytest.raises(RuntimeError, match="query_seq_lens: expected at least 1 requests, got 0"):
        build_query(**on(device, batch), **rows._asdict())
    rows = poisoned_like(build_query_reference(**batch), device)
    rows = rows._replace(query_input_ids=rows.query_input_ids.short())
    with pytest.raises(RuntimeError, match="query_input_ids: expected int64, got int16"):
        build_query(**on(device, batch), **rows._asdict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positions,num_rejected", [([10, 11], 2), ([], 0), ([10, 11], 5)])
def test_a_request_without_a_valid_row_is_padded(device, positions, num_rejected):
    """Nothing is read before its first row, even in row 0 of the batch."""
    rows = query_rows(device, one_request(positions, num_rejected, [[9, 3]], [10]))
    assert rows.context_positions.tolist() == [0] * len(positions)
    assert rows.context_slot_mappings[0].tolist() == [-1] * len(positions)
    assert rows.query_input_ids.tolist() == rows.query_positions.tolist() == [0, 0, 0]
    assert rows.query_slot_mappings[0].tolist() == [-1, -1, -1]
    assert rows.query_seq_lens.tolist() == [0]
    assert rows.sample_idx_mapping.tolist() == [-1, -1]


@pytest.mark.parametrize("device", DEVICES)
def test_null_blocks_and_short_tables_store_nothing(device):
    """Block 0 is never written, in the group whose block it is (trap 7)."""
    tables = [[0, 3], [2, 0], [2]]
    rows = query_rows(device, one_request([2, 3], 0, tables, [4, 4, 4]))
    assert [t.tolist() for t in rows.context_slot_mappings] == [[-1, -1], [10, 11], [10, 11]]
    expected = [[12, 13, 14], [-1, -1, -1], [-1, -1, -1]]
    assert [t.tolist() for t in rows.query_slot_mappings] == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "last,positions,slots,seq_len",
    [
        (12, [13, 14, 15], [33, 34, 35], 16),
        (13, [14, 15, 15], [34, 35, -1], 16),
        (14, [15, 15, 15], [35, -1, -1], 16),
        (15, [15, 15, 15], [-1, -1, -1], 16),
    ],
)
def test_the_end_of_the_context(device, last, positions, slots, seq_len):
    """Up to a prompt as long as max_model_len (traps 11, 12, 25); the table has spare columns."""
    changes = {"max_model_len": 16}
    rows = query_rows(device, one_request([last], 0, [[9, 3, 7, 7]], [10], **changes))
    assert rows.query_positions.tolist() == positions
    assert rows.query_slot_mappings[0].tolist() == slots
    assert rows.query_seq_lens.tolist() == [seq_len]
    # Sample positions key the noise: clamping would share it between positions.
    assert rows.sample_positions.tolist() == [last + 2, last + 3]


@pytest.mark.parametrize("device", DEVICES)
def test_one_token_prompts_with_more_query_rows_than_context_rows(device):
    """Traps 22 and 25: 4 context rows, 64 query rows."""
    batch = one_request([0, 0, 0, 0], 0, [[1]], [16], num_speculative_tokens=15)
    batch |= {
        "query_start_loc": int32([0, 1, 2, 3, 4]),
        "num_sampled": int32([1] * 4),
        "num_rejected": int32([0] * 4),
        "last_sampled": int64([5, 6, 7, 8]),
        "next_prefill_tokens": int64([0] * 4),
        "idx_mapping": int32([3, 2, 1, 0]),
        "block_tables": [int32([[1, 0], [2, 5], [3, 0], [4, 6]])],
    }
    rows = query_rows(device, batch)
    assert rows.context_slot_mappings[0].tolist() == [16, 32, 48, 64]
    assert rows.query_input_ids[::16].tolist() == [8, 7, 6, 5]
    assert rows.query_positions.tolist() == list(range(1, 17)) * 4
    assert rows.query_slot_mappings[0][15::16].tolist() == [-1, 80, -1, 96]
    assert rows.query_seq_lens.tolist() == [17] * 4
    assert rows.sample_rows.tolist() == [row for row in range(64) if row % 16]


@pytest.mark.parametrize("device", DEVICES)
def test_build_query_strided_and_empty(device):
    sizes = ([4, 16], 3, 50, False, 6, 2)
    batch = random_batch(torch.Generator().manual_seed(1), 5, 4, *sizes)
    expected = build_query_reference(**batch)
    batch = on(device, batch)
    wide = [torch.cat([table, table], dim=1) for table in batch["block_tables"]]
    batch["block_tables"] = [table[:, : table.shape[1] // 2] for table in wide]
    rows = poisoned_like(expected, device)
    build_query(**batch, **rows._asdict())
    assert_fields_equal(rows, expected)

    rows = query_rows(device, random_batch(torch.Generator(), 0, 0, *sizes))
    assert rows.draft_query_start_loc.tolist() == [0]
    assert rows.context_positions.tolist() == [0, 0]
    assert [t.tolist() for t in rows.context_slot_mappings] == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"num_rejected": int64([0])}, "num_rejected: expected int32, got int64"),
        ({"query_start_loc": int32([0])}, r"query_start_loc: expected shape \[2\], got \[1\]"),
        ({"next_prefill_tokens": int64([0])}, r"next_prefill_tokens: expected shape \[2\]"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: expected 1..2147483647, got 0"),
        ({"block_tables": []}, r"block_tables: expected 1..8 K/V groups, got 0"),
        ({"block_tables": [int32([[1]])] * 9}, r"block_tables: expected 1..8 K/V groups, got 9"),
        (
            {"kv_block_sizes": [10, 10]},
            r"kv_block_sizes: expected 1 \(one per block table\), got 2",
        ),
        ({"kv_block_sizes": [0]}, r"kv_block_sizes\[0\]: expected 1..2147483647, got 0"),
        ({"block_tables": [int64([[1]])]}, r"block_tables\[0\]: expected int32, got int64"),
        ({"query_input_ids": int64([0])}, r"query_input_ids: expected shape \[3\], got \[1\]"),
        (
            {"query_slot_mappings": []},
            r"query_slot_mappings: expected 1 \(one per block table\), got 0",
        ),
        (
            {"context_slot_mappings": [int64([0])]},
            r"context_slot_mappings\[0\]: expected shape \[2\], got \[1\]",
        ),
    ],
)
def test_build_query_refuses_bad_input(change, message):
    batch = one_request([10, 11], 0, [[9, 3]], [10])
    arguments = batch | build_query_reference(**batch)._asdict() | change
    with pytest.raises(RuntimeError, match=message):
        build_query(**arguments)


def test_build_query_opcheck():
    batch = random_batch(torch.Generator(), 3, 2, [4, 16], 3, 50, False, 6, 2)
    rows = poisoned_like(build_query_reference(**batch), "cpu")
    check_op(torch.ops.dflash.build_query.default, (*batch.values(), *rows))
