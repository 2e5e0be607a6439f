# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.ops.advance import (
    LENGTH,
    RUNNING,
    STOP_TOKEN,
    AdvancedState,
    advance,
    advance_reference,
)

from .batches import (
    assert_fields_equal,
    guarded_like,
    int32,
    int64,
    integers,
    on,
    random_idx_mapping,
)
from .support import DEVICES, check_op

STOP = 2


def empty_state(num_states, num_columns, ring, device):
    """Step 0, the ring full of -1."""

    def zeros(count, dtype):
        return torch.zeros(count, dtype=dtype, device=device)

    return AdvancedState(
        seq_lens=zeros(num_states, torch.int32),
        last_sampled=zeros(num_states, torch.int64),
        tokens_left=zeros(num_states, torch.int32),
        finished=zeros(num_states, torch.int32),
        step=zeros(1, torch.int64),
        output_ring=torch.full((ring, num_states, 3 + num_columns), -1, device=device),
        token_counts=torch.zeros(num_states, 10, dtype=torch.int32, device=device),
    )


def random_state(rng, num_states, num_columns, ring, step, counted=True):
    return AdvancedState(
        seq_lens=integers(rng, 0, 1000, num_states).int(),
        last_sampled=integers(rng, 0, 9, num_states),
        tokens_left=integers(rng, 1, 2 * num_columns + 1, num_states).int(),
        finished=integers(rng, 0, 3, num_states).int(),
        step=int64([step]),
        output_ring=integers(rng, -9, 0, ring, num_states, 3 + num_columns),
        token_counts=integers(rng, -9, 9, num_states, 6).int() if counted else None,
    )


def random_batch(rng, num_reqs, num_live, num_states, num_columns, num_stop_ids):
    """A small vocabulary, so that stop tokens are met; -1 past num_sampled."""
    num_sampled = integers(rng, 0, num_columns + 1, num_reqs).int()
    tokens = integers(rng, 0, 6, num_reqs, num_columns)
    tokens[torch.arange(num_columns) >= num_sampled[:, None]] = -1
    return {
        "sampled_token_ids": tokens,
        "num_sampled": num_sampled,
        "idx_mapping": random_idx_mapping(rng, num_reqs, num_live, num_states),
        "stop_token_ids": (
            integers(rng, -1, 6, num_states, num_stop_ids) if num_stop_ids is not None else None
        ),
    }


def state_on(device, state):
    return AdvancedState(*(None if t is None else t.to(device, copy=True) for t in state))


def one_request(device, tokens, tokens_left, stop_token_ids):
    """One step of a request in state row 1 of 2, at s = 10."""
    state = empty_state(2, 4, 3, device)
    state.seq_lens.copy_(int32([5, 10]))
    state.tokens_left.copy_(int32([50, tokens_left]))
    advance(
        int64([tokens + [-1] * (4 - len(tokens))], device),
        int32([len(tokens)], device),
        int32([1], device),
        stop_token_ids,
        *state,
    )
    return state


@pytest.mark.parametrize("device", DEVICES)
def test_advance_commits(device):
    state = one_request(device, [7, 8, 9], 5, None)
    assert state.seq_lens.tolist() == [5, 13]
    assert state.last_sampled.tolist() == [0, 9]
    assert state.tokens_left.tolist() == [50, 2]
    assert state.finished.tolist() == [RUNNING, RUNNING]
    assert state.step.tolist() == [1]
    assert state.output_ring[0, 1].tolist() == [0, 3, RUNNING, 7, 8, 9, -1]
    assert state.output_ring[0, 0].tolist() == [-1] * 7
    assert (state.output_ring[1:] == -1).all()
    assert state.token_counts.tolist() == [[0] * 10, [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]]


@pytest.mark.parametrize("device", DEVICES)
def test_advance_counts_tokens_beside_the_prompt_bit(device):
    """A token committed twice counts twice; one past the columns of token_counts is not counted."""
    state = empty_state(3, 4, 3, device)
    state.token_counts[1] = -(1 << 31)
    state.tokens_left.fill_(50)
    tokens = int64([[3, 3, 9, 10], [4, 3, 3, 3]], device)
    num_sampled, idx_mapping = int32([4, 1], device), int32([1, 2], device)
    advance(tokens, num_sampled, idx_mapping, None, *state)
    expected = torch.zeros(3, 10, dtype=torch.int32)
    expected[1] = -(1 << 31)
    expected[1, 3], expected[1, 9], expected[2, 4] = 2 - (1 << 31), 1 - (1 << 31), 1
    assert torch.equal(state.token_counts.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "tokens,tokens_left,stop_ids,finished",
    [
        ([7], 1, [], LENGTH),  # max_tokens = 1 (trap 25)
        ([7, 8], 2, [STOP], LENGTH),
        ([7, STOP], 3, [STOP], STOP_TOKEN),
        ([7, STOP], 2, [STOP], STOP_TOKEN),  # both: the stop token wins
        ([STOP], 1, [-1, 4, STOP], STOP_TOKEN),
        ([7, STOP], 3, [-1, -1], RUNNING),
        ([7, STOP], 3, [], RUNNING),
        ([7, 8, 9, 4], 5, [STOP], RUNNING),
    ],
)
def test_advance_finishes(device, tokens, tokens_left, stop_ids, finished):
    # State row 0 has a stop token of its own, which must not matter.
    stop_token_ids = int64([[8] * len(stop_ids), stop_ids], device)
    state = one_request(device, tokens, tokens_left, stop_token_ids)
    assert state.finished.tolist() == [RUNNING, finished]
    assert state.output_ring[0, 1, :3].tolist() == [0, len(tokens), finished]
    if not stop_ids:
        assert one_request(device, tokens, tokens_left, None).finished.tolist() == [
            RUNNING,
            finished,
        ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("finished", [RUNNING, STOP_TOKEN, LENGTH])
def test_nothing_sampled_leaves_the_state(device, finished):
    """A partial chunk, or a request that has finished: only the ring says that it was there."""
    rng = torch.Generator().manual_seed(0)
    before = random_state(rng, 2, 3, 4, step=6)._replace(finished=int32([RUNNING, finished]))
    state = state_on(device, before)
    advance(int64([[-1, -1, -1]], device), int32([0], device), int32([1], device), None, *state)
    for name in ("seq_lens", "last_sampled", "tokens_left", "finished", "token_counts"):
        assert getattr(state, name).tolist() == getattr(before, name).tolist(), name
    assert state.step.tolist() == [7]
    assert state.output_ring[2, 1].tolist() == [6, 0, finished, -1, -1, -1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_columns", [1, 8, 16])
def test_advance_equals_reference(device, num_columns):
    rng = torch.Generator().manual_seed(0)
    for num_reqs, num_live, step in [
        (1, 1, 0),
        (4, 0, 5),
        (5, 3, 2**40),
        (33, 33, 7),
        (1500, 1300, 3),
    ]:
        state = random_state(rng, num_reqs + 1, num_columns, 3, step)
        batch = random_batch(rng, num_reqs, num_live, num_reqs + 1, num_columns, 4)
        expected = advance_reference(**batch, **state._asdict())
        buffers, check_guards = guarded_like(state, device)
        for buffer, tensor in zip(buffers, state, strict=True):
            buffer.copy_(tensor)
        advance(**on(device, batch), **buffers._asdict())
        assert_fields_equal(buffers, expected)
        check_guards()


@pytest.mark.parametrize("device", DEVICES)
def test_advance_of_4096_requests(device):
    """More requests than a CTA has threads, over more steps than the ring holds (trap 16)."""
    rng = torch.Generator().manual_seed(0)
    expected = random_state(rng, 4096, 4, 2, 0)
    state = state_on(device, expected)
    for num_live in [4096, 3000, 17]:
        batch = random_batch(rng, 4096, num_live, 4096, 4, 2)
        expected = advance_reference(**batch, **expected._asdict())
        advance(**on(device, batch), **state._asdict())
        assert_fields_equal(state, expected)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(0, 6),
    num_padded=st.integers(0, 6),
    num_columns=st.integers(1, 9),
    num_stop_ids=st.one_of(st.none(), st.integers(0, 4)),
    ring=st.integers(1, 4),
    num_steps=st.integers(1, 4),
    counted=st.booleans(),
)
def test_advance_property(
    device, seed, num_reqs, num_padded, num_columns, num_stop_ids, ring, num_steps, counted
):
    """Several steps, each with its own requests."""
    rng = torch.Generator().manual_seed(seed)
    expected = random_state(rng, num_reqs + 1, num_columns, ring, seed, counted)
    state = state_on(device, expected)
    for _ in range(num_steps):
        num_live = max(0, num_reqs - num_padded)
        batch = random_batch(rng, num_reqs, num_live, num_reqs + 1, num_columns, num_stop_ids)
        expected = advance_reference(**batch, **expected._asdict())
        advance(**on(device, batch), **state._asdict())
    assert_fields_equal(state, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_advance_strided_and_empty(device):
    rng = torch.Generator().manual_seed(1)
    state = random_state(rng, 6, 4, 3, 1)
    batch = random_batch(rng, 5, 4, 6, 4, 3)
    expected = advance_reference(**batch, **state._asdict())

    batch, state = on(device, batch), state_on(device, state)
    for name in ("sampled_token_ids", "stop_token_ids"):
        batch[name] = torch.cat([batch[name]] * 2, dim=1)[:, : batch[name].shape[1]]
        assert not batch[name].is_contiguous()
    ring = torch.zeros(6, 3, 10, dtype=torch.int64, device=device)  # state rows outermost
    counts = torch.zeros(6, 9, dtype=torch.int32, device=device)
    state = state._replace(
        output_ring=ring.transpose(0, 1)[..., :7].copy_(state.output_ring),
        token_counts=counts[:, :6].copy_(state.token_counts),
    )
    advance(**batch, **state._asdict())
    assert_fields_equal(state, expected)
    assert (ring[..., 7:] == 0).all() and (counts[:, 6:] == 0).all()

    empty = empty_state(0, 4, 1, device)
    advance(**on(device, random_batch(rng, 0, 0, 0, 4, None)), **empty._asdict())
    assert empty.step.tolist() == [1]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"seq_lens": int64([0, 0])}, "seq_lens: expected int32, got int64"),
        ({"step": int64([0, 0])}, r"step: expected shape \[1\], got \[2\]"),
        ({"finished": int32([0])}, r"finished: expected shape \[2\], got \[1\]"),
        (
            {"output_ring": torch.zeros(3, 2, 6, dtype=torch.int64)},
            r"output_ring: expected shape \[\*, 2, 7\], got \[3, 2, 6\]",
        ),
        (
            {"output_ring": torch.zeros(0, 2, 7, dtype=torch.int64)},
            r"output_ring: expected at least one step, got \[0, 2, 7\]",
        ),
        ({"token_counts": int64([[0], [0]])}, "token_counts: expected int32, got int64"),
        ({"token_counts": int32([[0]])}, r"token_counts: expected shape \[2, \*\], got \[1, 1\]"),
    ],
)
def test_advance_refuses_bad_state(change, message):
    state = empty_state(2, 4, 3, "cpu")._replace(**change)
    with pytest.raises(RuntimeError, match=message):
        advance(int64([[1, 2, 3, 4]]), int32([4]), int32([1]), None, *state)


def test_advance_refuses_bad_input():
    state = empty_state(2, 4, 3, "cpu")
    with pytest.raises(RuntimeError, match=r"num_sampled: expected shape \[1\], got \[2\]"):
        advance(int64([[1, 2, 3, 4]]), int32([4, 4]), int32([1]), None, *state)
    with pytest.raises(
        RuntimeError, match=r"stop_token_ids: expected shape \[2, \*\], got \[1, 1\]"
    ):
        advance(int64([[1, 2, 3, 4]]), int32([4]), int32([1]), int64([[1]]), *state)


@pytest.mark.parametrize("num_stop_ids,counted", [(None, False), (2, True)])
def test_advance_opcheck(num_stop_ids, counted):
    rng = torch.Generator().manual_seed(0)
    batch = random_batch(rng, 3, 2, 4, 4, num_stop_ids)
    state = random_state(rng, 4, 4, 3, 1, counted)
    check_op(torch.ops.dflash.advance.default, (*batch.values(), *state))
