# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops import noise_reference
from dflash.ops.sample_draft import sample_draft, sample_draft_reference

from .support import DEVICES, DTYPES, check_op, guarded, to_device


def make_case(num_states=5, num_drafts=3, columns=40, dtype=torch.float32, vocab_size=37):
    """Inputs of a batch of all states but one, in a shuffled order, the last one padded."""
    num_rows = (num_states - 1) * num_drafts
    states = torch.randperm(num_states)[: num_states - 1].to(torch.int32)
    states[-1] = -1
    return {
        "logits": (torch.randn(num_rows, columns) * 3).to(dtype),
        "sample_positions": torch.randint(1, 10000, (num_rows,)),
        "sample_idx_mapping": states.repeat_interleave(num_drafts),
        "temperatures": torch.tensor([0.0, 0.7, 1.0, 1.9])[torch.arange(num_states) % 4],
        "seeds": torch.randint(-(2**62), 2**62, (num_states,)),
        "vocab_size": vocab_size,
        "logit_scale": 0.75,
    }


def make_d2t(vocab_size, target_vocab_size):
    ids = torch.randperm(target_vocab_size)[:vocab_size].sort().values
    return ids - torch.arange(vocab_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns,vocab_size", [(1, 1), (40, 37), (4104, 4099), (9001, 9001)])
@pytest.mark.parametrize("recorded", [None, *DTYPES])
@pytest.mark.parametrize("reduced", [False, True])
def test_sample_draft_equals_reference(device, dtype, columns, vocab_size, recorded, reduced):
    num_states, num_drafts = 5, 3
    target_vocab_size = vocab_size + 21
    case = make_case(num_states, num_drafts, columns, dtype, vocab_size)
    if reduced:
        case["d2t"] = make_d2t(vocab_size, target_vocab_size)
    tokens, check_tokens = guarded((num_states, num_drafts), torch.int64, device)
    expected = torch.full((num_states, num_drafts), 77)
    record, expected_record = {}, {}
    if recorded is not None:
        shape = (num_states, num_drafts, target_vocab_size)
        logits, check_logits = guarded(shape, recorded, device)
        record = {"draft_logits": logits}
        expected_record = {"draft_logits": logits.cpu().clone()}
    sample_draft(draft_tokens=tokens, **to_device(device, case), **record)
    sample_draft_reference(draft_tokens=expected, **case, **expected_record)
    check_tokens()
    assert torch.equal(tokens.cpu(), expected)
    if recorded is not None:
        check_logits()
        torch.testing.assert_close(
            record["draft_logits"].cpu(), expected_record["draft_logits"], rtol=0, atol=0
        )


@pytest.mark.parametrize("device", DEVICES)
def test_without_temperatures_every_row_is_its_argmax(device):
    case = make_case()
    del case["temperatures"], case["seeds"]
    tokens = torch.full((5, 3), -7, device=device)
    sample_draft(draft_tokens=tokens, **to_device(device, case))
    expected = torch.full((5, 3), -7)
    for j, s in enumerate(case["sample_idx_mapping"].tolist()):
        if s >= 0:
            expected[s, j % 3] = case["logits"][j, :37].argmax()
    assert torch.equal(tokens.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 3, 1023, 1024, 4095, 4096, 8191])
def test_the_first_of_equal_maxima_wins(device, first):
    logits = torch.zeros(1, 9000, device=device)
    logits[0, first:] = 2.0
    assert draft_one(logits) == first


@pytest.mark.parametrize("device", DEVICES)
def test_minus_zero_equals_zero(device):
    assert draft_one(torch.tensor([[-1.0, -0.0, 0.0]], device=device)) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_counts_as_minus_infinity(device, temperature):
    logits = torch.full((1, 5000), float("nan"), device=device)
    assert draft_one(logits, temperature) == 0
    logits[0, 4444] = -1e30
    assert draft_one(logits, temperature) == 4444
    logits[0, 4445] = float("inf")
    assert draft_one(logits, temperature) == 4445


def draft_one(logits, temperature=0.0):
    device = logits.device
    tokens = torch.full((1, 1), -7, device=device)
    sample_draft(
        logits,
        torch.tensor([9], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        tokens,
        temperatures=torch.tensor([temperature], device=device),
        seeds=torch.tensor([5], device=device),
    )
    return tokens.item()


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors_and_empty_input(device):
    case = to_device(device, make_case(columns=37))
    wide = torch.zeros(12, 50, device=device)
    wide[:, 7:44] = case["logits"]
    tokens = torch.zeros(5, 3, dtype=torch.int64, device=device)
    strided = torch.zeros(5, 9, dtype=torch.int64, device=device)
    sample_draft(draft_tokens=tokens, **case)
    sample_draft(draft_tokens=strided[:, 2:5], **{**case, "logits": wide[:, 7:44]})
    assert torch.equal(strided[:, 2:5], tokens)
    assert strided[:, :2].eq(0).all() and strided[:, 5:].eq(0).all()
    ints = torch.empty(0, dtype=torch.int64, device=device)
    sample_draft(torch.empty(0, 37, device=device), ints, ints.int(), tokens)
    assert torch.equal(strided[:, 2:5], tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_the_record_is_what_was_drawn_from(device):
    """bf16 merges 256 and 256.9: drawn from the record, both are equally likely."""
    trials = 20000
    logits = torch.tensor([[256.0, 256.9]], device=device).repeat(trials, 1)
    tokens = torch.zeros(trials, 1, dtype=torch.int64, device=device)
    sample_draft(
        logits,
        torch.ones(trials, dtype=torch.int64, device=device),
        torch.arange(trials, dtype=torch.int32, device=device),
        tokens,
        temperatures=torch.ones(trials, device=device),
        seeds=torch.arange(trials, device=device),
        draft_logits=torch.empty(trials, 1, 2, dtype=torch.bfloat16, device=device),
    )
    assert abs(tokens.double().mean().item() - 0.5) < 0.02


def agreement(device, logits, seeds, position, offset):
    """Draft tokens at a column of blocks whose anchor is position - offset - 1."""
    trials, columns = len(seeds), 4
    tokens = torch.zeros(trials, columns, dtype=torch.int64, device=device)
    rows = trials * columns
    sample_draft(
        logits.repeat(rows, 1),
        torch.full((rows,), position, device=device),
        torch.arange(trials, dtype=torch.int32, device=device).repeat_interleave(columns),
        tokens,
        temperatures=torch.ones(trials, device=device),
        seeds=seeds,
    )
    return tokens[:, offset]


@pytest.mark.parametrize("device", DEVICES)
def test_a_position_drafted_again_gets_fresh_noise(device):
    trials = 20000
    logits = torch.zeros(8, device=device)
    seeds = torch.arange(trials, device=device)
    once = agreement(device, logits, seeds, position=50, offset=3)
    again = agreement(device, logits, seeds, position=50, offset=1)
    assert abs((once == again).double().mean().item() - 1 / 8) < 0.012
    assert torch.equal(once, agreement(device, logits, seeds, position=50, offset=3))


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_drafted_column_by_column_is_the_block(device):
    """Tokens and record; every call sees one column of both, and its own rows."""
    num_states, num_drafts, columns = 5, 4, 300
    case = to_device(device, make_case(num_states, num_drafts, columns, vocab_size=columns))
    case["temperatures"] = case["temperatures"].clamp(min=0.5)
    anchors = case["sample_positions"][::num_drafts].repeat_interleave(num_drafts)
    offsets = torch.arange(num_drafts, device=device).repeat(num_states - 1) + 1
    case["sample_positions"] = anchors + offsets
    tokens = torch.full((2, num_states, num_drafts), -7, device=device)
    record = torch.zeros(2, num_states, num_drafts, columns, device=device)
    sample_draft(draft_tokens=tokens[0], draft_logits=record[0], **case)
    rows = ("logits", "sample_positions", "sample_idx_mapping")
    for i in range(num_drafts):
        own = case | {name: case[name][i::num_drafts].contiguous() for name in rows}
        sample_draft(
            draft_tokens=tokens[1, :, i : i + 1],
            draft_logits=record[1, :, i : i + 1],
            first_column=i,
            **own,
        )
    assert torch.equal(tokens[0], tokens[1]) and torch.equal(record[0], record[1])


@pytest.mark.parametrize("device", DEVICES)
def test_the_noise_is_keyed_by_the_target_id(device):
    """A drafter of a part of the vocabulary ranks its ids as one of all of it does."""
    ids = make_d2t(64, 300) + torch.arange(64)
    for seed in range(20):
        full = torch.full((1, 300), -torch.inf)
        full[0, ids] = torch.randn(64)
        case = {
            "sample_positions": torch.tensor([11]),
            "sample_idx_mapping": torch.zeros(1, dtype=torch.int32),
            "temperatures": torch.ones(1),
            "seeds": torch.tensor([seed]),
        }
        tokens = torch.zeros(2, 1, dtype=torch.int64, device=device)
        case = to_device(device, case)
        d2t = (ids - torch.arange(64)).to(device)
        sample_draft(full.to(device), draft_tokens=tokens[:1], **case)
        sample_draft(full[:, ids].to(device), draft_tokens=tokens[1:], d2t=d2t, **case)
        assert tokens[0] == tokens[1]


def test_reference_noise_known_answers():
    """Random123's kat_vectors for philox4x32 with 10 rounds."""

    def one(key, counter):
        words = noise_reference.philox4x32_10(key, (torch.tensor(counter[0]), *counter[1:]))
        return [int(word) for word in words]

    assert one(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert one(2**64 - 1, (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    key = 0x299F31D0 << 32 | 0xA4093822
    assert one(key, digits) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_bad_input_is_named():
    case = make_case()
    tokens = torch.zeros(5, 3, dtype=torch.int64)

    def call(**changes):
        return sample_draft(**{**case, "draft_tokens": tokens, **changes})

    with pytest.raises(ValueError, match=r"vocab_size: expected 1 to 40 .*, got 41"):
        call(vocab_size=41)
    with pytest.raises(ValueError, match="seeds: required with temperatures"):
        call(seeds=None)
    with pytest.raises(RuntimeError, match=r"sample_positions: expected shape \[12\], got \[11\]"):
        call(sample_positions=case["sample_positions"][:11])
    with pytest.raises(RuntimeError, match="sample_idx_mapping: expected int32, got int64"):
        call(sample_idx_mapping=case["sample_idx_mapping"].long())
    with pytest.raises(RuntimeError, match="logits: expected float32, float16 or bfloat16"):
        call(logits=case["logits"].long())
    with pytest.raises(RuntimeError, match="logits: the last dimension must be contiguous"):
        call(logits=torch.zeros(12, 80)[:, ::2])
    with pytest.raises(RuntimeError, match=r"d2t: expected shape \[37\], got \[36\]"):
        call(d2t=torch.zeros(36, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="first_column: expected 0 to 65535, got -1"):
        call(first_column=-1)
    with pytest.raises(RuntimeError, match="draft_logits: expected at least vocab_size = 37"):
        call(draft_logits=torch.zeros(5, 3, 36))
    with pytest.raises(RuntimeError, match=r"draft_logits: expected shape \[5, 3, \*\]"):
        call(draft_logits=torch.zeros(5, 4, 37))


def test_opcheck():
    case = make_case()
    positional = (
        case["logits"],
        case["sample_positions"],
        case["sample_idx_mapping"],
        case["temperatures"],
        case["seeds"],
        37,
        1.0,
        None,
        2,
        torch.zeros(5, 3, dtype=torch.int64),
        torch.zeros(5, 3, 37),
    )
    check_op(torch.ops.dflash.sample_draft.default, positional)
    greedy = (*positional[:3], None, None, *positional[5:10], None)
    check_op(torch.ops.dflash.sample_draft.default, greedy)


@pytest.mark.gpu
def test_rows_times_vocabulary_past_2_to_the_31():
    """Logits of 4.4 GB, and a record of as many elements: the last row lies past 2^31."""
    device, vocab_size = "cuda", 131072
    num_rows = 2**31 // vocab_size + 16
    logits = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device=device)
    winners = (torch.arange(num_rows, device=device) * 7919) % vocab_size
    logits[torch.arange(num_rows, device=device), winners] = 1.0
    record = torch.empty(num_rows, 1, vocab_size, dtype=torch.bfloat16, device=device)
    tokens = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
    sample_draft(
        logits,
        torch.ones(num_rows, dtype=torch.int64, device=device),
        torch.arange(num_rows, dtype=torch.int32, device=device),
        tokens,
        draft_logits=record,
    )
    assert torch.equal(tokens[:, 0], winners)
    assert torch.equal(record[-1, 0], logits[-1])


@pytest.mark.gpu
def test_replayed_from_a_graph():
    case = to_device("cuda", make_case(columns=151936, vocab_size=151936))
    tokens = torch.zeros(5, 3, dtype=torch.int64, device="cuda")
    sample_draft(draft_tokens=tokens, **case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_draft(draft_tokens=tokens, **case)
    for _ in range(3):
        case["logits"].normal_()
        case["sample_positions"] += 1
        graph.replay()
        expected = torch.zeros_like(tokens)
        sample_draft(draft_tokens=expected, **case)
        assert torch.equal(tokens, expected)
