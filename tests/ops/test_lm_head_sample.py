# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops import noise_reference
from dflash.ops.linear import linear
from dflash.ops.lm_head_sample import (
    lm_head_sample,
    lm_head_sample_reference,
)
from dflash.ops.process_logits import process_logits
from dflash.ops.rejection_sample import rejection_sample

from .support import DEVICES, DTYPES, check_op, guarded, to_device

RELATIVE_GAP = 1e-5
"""Tokens are those of the fp64 sums where the best leads by this share of |x| times the largest |w|, and as much
again for the noise: what sums and logarithms in fp32 may change."""


def make_draft(num_states=6, num_drafts=3, rows=40, size=64, dtype=torch.float32, vocab_size=37):
    """Draft rows of all states but one, in a shuffled order, the last one padded."""
    num_rows = (num_states - 1) * num_drafts
    states = torch.randperm(num_states)[: num_states - 1].to(torch.int32)
    states[-1] = -1
    return {
        "hidden_states": torch.randn(num_rows, size).to(dtype),
        "weight": (torch.randn(rows, size) * 2 * size**-0.5).to(dtype),
        "positions": torch.randint(10, 10000, (num_rows,)),
        "idx_mapping": states.repeat_interleave(num_drafts),
        "temperatures": torch.tensor([0.0, 0.7, 1.0, 1.9])[torch.arange(num_states) % 4],
        "seeds": torch.randint(-(2**62), 2**62, (num_states,)),
        "vocab_size": vocab_size,
        "logit_scale": 0.75,
    }


def make_verified(counts, rows=40, size=64, dtype=torch.float32, vocab_size=37):
    """Verified rows, counts[r] of request r; the last request is padded, one more row is nobody's."""
    num_reqs, num_rows = len(counts), sum(counts) + 1
    case = make_draft(num_reqs + 2, 1, rows, size, dtype, vocab_size)
    states = torch.randperm(num_reqs + 2)[:num_reqs].to(torch.int32)
    states[-1] = -1
    return case | {
        "hidden_states": torch.randn(num_rows, size).to(dtype),
        "positions": torch.randint(0, 10000, (num_rows,)),
        "idx_mapping": states,
        "logits_start_loc": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
    }


def tokens_of(case, device="cpu", shape=None):
    """Poisoned tokens for the case, and a check of what lies around them."""
    if shape is None and "logits_start_loc" in case:
        shape = case["positions"].shape
    return guarded(shape or (6, 3), torch.int64, device)


def make_d2t(vocab_size, target_vocab_size):
    ids = torch.randperm(target_vocab_size)[:vocab_size].sort().values
    return ids - torch.arange(vocab_size)


def assert_first_maxima(case, tokens, expected):
    """Equal where no two scores in fp64 lie within the gap; elsewhere one of those that do."""
    hidden, weight = case["hidden_states"].double(), case["weight"].double()
    gap = RELATIVE_GAP * (1 + hidden.norm(dim=1).max() * weight.norm(dim=1).max()).item()
    different = (tokens != expected).nonzero()
    assert len(different) <= 1 + tokens.numel() // 50
    for where in different.tolist():
        best, chosen = (score(case, where, t[tuple(where)].item()) for t in (expected, tokens))
        assert 0 <= best - chosen <= gap, (where, best, chosen)


def score(case, where, token):
    """In fp64, of a target id at a place of tokens."""
    d2t = case.get("d2t")
    ids = torch.arange(case["vocab_size"]) + (0 if d2t is None else d2t)
    column = int((ids == token).nonzero()[0])
    start_loc = case.get("logits_start_loc")
    if start_loc is None:
        s, i = where
        rows = case["idx_mapping"].view(-1, 3)
        row = int((rows[:, 0] == s).nonzero()[0]) * 3 + i
        key = (noise_reference.DRAFT, int(case["positions"][row]) - i - 1, i + 1)
    else:
        row = where[0]
        s = int(case["idx_mapping"][int((start_loc <= row).nonzero()[-1])])
        key = (noise_reference.TARGET, int(case["positions"][row]) + 1, 0)
    logit = case["hidden_states"][row].double() @ case["weight"][column].double()
    logit = logit.item() * case["logit_scale"]
    temperature = float(case["temperatures"][s])
    if temperature == 0:
        return logit
    stream, position, offset = key
    ids = torch.tensor([token])
    noise = noise_reference.gumbel(stream, int(case["seeds"][s]), position, offset, ids)
    return logit / temperature + noise.item()


def check(case, device):
    tokens, check_tokens = tokens_of(case, device)
    expected = tokens.cpu().clone()
    lm_head_sample(tokens=tokens, **to_device(device, case))
    lm_head_sample_reference(tokens=expected, **case)
    check_tokens()
    assert_first_maxima(case, tokens.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows,vocab_size,size", [(1, 1, 1), (40, 37, 64), (4104, 4099, 17), (9016, 9001, 72)]
)
@pytest.mark.parametrize("reduced", [False, True])
def test_draft_rows_equal_reference(device, dtype, rows, vocab_size, size, reduced):
    case = make_draft(rows=rows, size=size, dtype=dtype, vocab_size=vocab_size)
    if reduced:
        case["d2t"] = make_d2t(vocab_size, vocab_size + 21)
    check(case, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(1,), (3, 0, 2, 5, 4), (16, 16, 0, 0, 7, 16)])
@pytest.mark.parametrize("rows,vocab_size,size", [(40, 37, 64), (9016, 9001, 72)])
def test_verified_rows_equal_reference(device, dtype, counts, rows, vocab_size, size):
    check(make_verified(counts, rows, size, dtype, vocab_size), device)


@pytest.mark.parametrize("device", DEVICES)
def test_16_bit_products_are_not_rounded(device):
    """256 and 256.5 are one bfloat16."""
    weight = torch.zeros(9000, 64, dtype=torch.bfloat16)
    weight[11, 0] = weight[8700, 0] = 256.0
    weight[8700, 1] = 0.5
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden = torch.ones(1, 64, dtype=torch.bfloat16)
    sample_one(hidden.to(device), weight.to(device), tokens)
    assert tokens.item() == 8700


def sample_one(hidden, weight, tokens, **options):
    device = hidden.device
    return lm_head_sample(
        hidden,
        weight,
        torch.tensor([9], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        tokens,
        **options,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 3, 15, 63, 64, 127, 191, 192, 4095, 8639, 8640, 25343, 25344])
def test_the_first_of_equal_maxima_wins(device, first):
    """Wherever it lies: in a quad, a fragment, a warpgroup, a tile, another CTA's or the next of the same CTA."""
    weight = torch.zeros(26000, 64, dtype=torch.bfloat16, device=device)
    weight[first:] = 0.5
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    sample_one(hidden, weight, tokens)
    assert tokens.item() == first
    sample_one(hidden, weight, tokens, logit_scale=-1.0)
    assert tokens.item() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_padding_of_the_vocabulary_is_never_sampled(device):
    weight = torch.zeros(9216, 64, dtype=torch.bfloat16, device=device)
    weight[8999] = 0.25
    weight[9000:] = 50.0
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    sample_one(hidden, weight, tokens, vocab_size=9000)
    assert tokens.item() == 8999
    one = {"temperatures": torch.ones(1, device=device)}
    for seed in range(50):
        seeds = torch.tensor([seed], device=device)
        sample_one(hidden, weight, tokens, vocab_size=9000, seeds=seeds, **one)
        assert tokens.item() < 9000


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_nan_counts_as_minus_infinity(device, temperature):
    weight = torch.full((9000, 64), float("nan"), dtype=torch.bfloat16, device=device)
    tokens = torch.full((1, 1), -7, device=device)
    hidden = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    options = {}
    if temperature is not None:
        options["temperatures"] = torch.tensor([temperature], device=device)
        options["seeds"] = torch.tensor([5], device=device)
    sample_one(hidden, weight, tokens, **options)
    assert tokens.item() == 0
    weight[4444] = -1e30
    sample_one(hidden, weight, tokens, **options)
    assert tokens.item() == 4444
    weight[4445] = 3e38
    sample_one(hidden, weight, tokens, **options)
    assert tokens.item() == 4445
    weight[4446] = 3.2e38  # both sums are infinite
    sample_one(hidden, weight, tokens, **options)
    assert tokens.item() == 4445


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,vocab_size", [(40, 37), (9016, 9001)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_acceptance_from_tokens_is_that_of_the_logits(device, dtype, rows, vocab_size, temperature):
    """lm_head_sample and rejection_sample, beside linear, process_logits and rejection_sample."""
    num_drafts, counts = 3, (4, 1, 0, 4, 3, 2)
    case = make_verified(counts, rows, 64, dtype, vocab_size)
    case["logit_scale"] = 1.0
    case["temperatures"] = torch.where(case["temperatures"] > 0, temperature, 0.0)
    case = to_device(device, case)
    num_states = len(case["seeds"])
    logits = torch.empty(len(case["positions"]), rows, device=device)
    linear(case["hidden_states"], case["weight"], None, logits)
    drafts = torch.randint(-1, vocab_size, (num_states, num_drafts)).to(device)
    for r, s in enumerate(
        case["idx_mapping"].tolist()[:-1]
    ):  # half of them are what the target likes
        if r % 2 == 0:
            start = int(case["logits_start_loc"][r])
            drafts[s] = logits[start : start + num_drafts, :vocab_size].argmax(-1)
    rest = (
        case["logits_start_loc"],
        case["positions"],
        case["idx_mapping"],
        drafts,
    )
    processed = process_logits(logits, *rest, case["temperatures"], vocab_size=vocab_size)
    limits = (
        torch.full((num_states,), num_drafts, dtype=torch.int32, device=device),
        case["temperatures"],
        case["seeds"],
        torch.full((num_states,), 100, dtype=torch.int32, device=device),
    )
    expected = rejection_sample(processed, *rest, *limits, vocab_size=vocab_size)
    tokens = lm_head_sample(tokens=torch.full_like(case["positions"], -7), **case)
    actual = rejection_sample(None, *rest, *limits, target_tokens=tokens, vocab_size=vocab_size)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    assert tokens[-1] == -7


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors_and_empty_input(device):
    case = to_device(device, make_draft(rows=9016, vocab_size=9001, dtype=torch.bfloat16))
    hidden = case["hidden_states"]
    tokens = torch.zeros(6, 3, dtype=torch.int64, device=device)
    strided = torch.zeros(6, 9, dtype=torch.int64, device=device)
    wide = torch.full((15, 80), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 8:72] = hidden
    lm_head_sample(tokens=tokens, **case)
    lm_head_sample(tokens=strided[:, 2:5], **{**case, "hidden_states": wide[:, 8:72]})
    assert torch.equal(strided[:, 2:5], tokens)
    assert strided[:, :2].eq(0).all() and strided[:, 5:].eq(0).all()
    ints = torch.empty(0, dtype=torch.int64, device=device)
    lm_head_sample(hidden[:0], case["weight"], ints, ints.int(), tokens)
    lm_head_sample(
        hidden[:0], case["weight"], ints, ints.int(), ints, logits_start_loc=ints.new_zeros(1).int()
    )
    assert torch.equal(strided[:, 2:5], tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_sampled_column_by_column_is_the_block(device):
    case = to_device(device, make_draft(rows=9016, vocab_size=9001, dtype=torch.bfloat16))
    anchors = case["positions"][::3].repeat_interleave(3)
    case["positions"] = anchors + torch.arange(3, device=device).repeat(5)
    case["temperatures"] = case["temperatures"].clamp(min=0.5)
    tokens = torch.full((2, 6, 3), -7, device=device)
    lm_head_sample(tokens=tokens[0], **case)
    for i in range(3):
        rows = ("hidden_states", "positions", "idx_mapping")
        own = case | {name: case[name][i::3].contiguous() for name in rows}
        lm_head_sample(tokens=tokens[1, :, i : i + 1], first_column=i, **own)
    assert torch.equal(tokens[0], tokens[1])


def test_bad_input_is_named():
    case = make_draft()
    tokens = torch.zeros(6, 3, dtype=torch.int64)

    def call(**changes):
        return lm_head_sample(**{**case, "tokens": tokens, **changes})

    with pytest.raises(ValueError, match=r"vocab_size: expected 1 to 40 .*, got 41"):
        call(vocab_size=41)
    with pytest.raises(ValueError, match="seeds: required with temperatures"):
        call(seeds=None)
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[\*, 64\], got \[40, 63\]"):
        call(weight=torch.zeros(40, 63))
    with pytest.raises(RuntimeError, match=r"positions: expected shape \[15\], got \[14\]"):
        call(positions=case["positions"][:14])
    with pytest.raises(RuntimeError, match=r"idx_mapping: expected shape \[15\], got \[14\]"):
        call(idx_mapping=case["idx_mapping"][:14])
    with pytest.raises(RuntimeError, match=r"logits_start_loc: expected shape \[16\], got \[3\]"):
        call(logits_start_loc=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"tokens: expected shape \[15\], got \[6, 3\]"):
        call(logits_start_loc=torch.zeros(16, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"d2t: expected shape \[37\], got \[36\]"):
        call(d2t=torch.zeros(36, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="first_column: expected 0 to 65535, got -1"):
        call(first_column=-1)


def test_opcheck():
    op = torch.ops.dflash.lm_head_sample.default
    case = make_draft()
    names = "hidden_states weight positions idx_mapping logits_start_loc temperatures seeds"
    inputs = [case.get(name) for name in names.split()]
    check_op(op, (*inputs, 37, 1.0, None, 2, torch.zeros(6, 3, dtype=torch.int64)))
    check_op(op, (*inputs[:5], None, None, 37, 1.0, None, 0, torch.zeros(6, 3, dtype=torch.int64)))
    case = make_verified((3, 2))
    inputs = [case[name] for name in names.split()]
    check_op(op, (*inputs, 37, 1.0, None, 0, torch.zeros(6, dtype=torch.int64)))
