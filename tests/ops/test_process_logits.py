# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.process_logits import IN_PROMPT, process_logits, process_logits_reference

from .support import DEVICES, DTYPES, guarded, to_device

GAP = 1e-5
"""Mass, and relative min_p, within which float32 and float64 may end the kept part differently."""

SIZES = [1, 37, 1000, 49152, 151936]

PROCESSORS = {
    "temperature": [],
    "top_k": ["top_ks"],
    "top_p": ["top_ps"],
    "min_p": ["min_ps"],
    "repetition": ["repetition_penalties"],
    "frequency": ["frequency_penalties"],
    "presence": ["presence_penalties"],
    "bias": ["logit_bias_ids", "logit_bias"],
    "min_tokens": ["min_seq_lens"],
    "selection": ["top_ks", "top_ps", "min_ps"],
    "penalties": ["repetition_penalties", "frequency_penalties", "presence_penalties"],
    "all": [
        "top_ks", "top_ps", "min_ps", "repetition_penalties", "frequency_penalties",
        "presence_penalties", "logit_bias_ids", "logit_bias", "min_seq_lens",
    ],
}  # fmt: skip


def cycle(values, count, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)[torch.arange(count) % len(values)]


def make_case(vocab_size, dtype=torch.float32, num_rows=(3, 0, 4, 1, 4), columns=None, seed=0):
    """A request for each of num_rows on a state of its own, the fourth padded; two more rows that
    no request owns. Every parameter of every processor, some of them off."""
    rng = torch.Generator().manual_seed(seed)
    num_reqs, num_drafts = len(num_rows), 3
    num_states = num_reqs + 2
    total = sum(num_rows) + 2

    def tokens(*shape):
        # Half of them among the first few, so that lists meet and repeat tokens.
        ids = torch.randint(-1, vocab_size + 1, shape, generator=rng)
        few = torch.randint(-1, min(vocab_size, 5), shape, generator=rng)
        return torch.where(torch.rand(shape, generator=rng) < 0.5, ids, few)

    counts = torch.randint(1, 4, (num_states, vocab_size), generator=rng)
    counts *= torch.rand(counts.shape, generator=rng) < 0.3
    in_prompt = torch.rand(counts.shape, generator=rng) < 0.2
    idx_mapping = torch.randperm(num_states, generator=rng)[:num_reqs].int()
    idx_mapping[3:4] = -1
    logits = torch.randn(total, columns or vocab_size, generator=rng) * 3
    return {
        "logits": logits.to(dtype),
        "logits_start_loc": torch.tensor([0, *num_rows], dtype=torch.int32).cumsum(0).int(),
        "logits_positions": torch.randint(0, 20, (total,), generator=rng),
        "idx_mapping": idx_mapping,
        "draft_tokens": tokens(num_states, num_drafts),
        "temperatures": cycle([0.6, 1.0, 0.0, 1.7], num_states),
        "top_ks": cycle([20, 1, 0, vocab_size, 3, 300], num_states, torch.int32),
        "top_ps": cycle([0.95, 0.5, 1e-6, 1.0, 0.999], num_states),
        "min_ps": cycle([0.05, 0.0, 1.0, 1e-4], num_states),
        "repetition_penalties": cycle([1.2, 1.0, 0.8], num_states),
        "frequency_penalties": cycle([0.3, 0.0, -0.5, 0.1], num_states),
        "presence_penalties": cycle([0.0, 0.4, 1.5, -0.2, 0.0], num_states),
        "token_counts": counts.int() | in_prompt.int() * IN_PROMPT,
        "logit_bias_ids": tokens(num_states, 4),
        "logit_bias": torch.randn(num_states, 4, generator=rng) * 5,
        "min_seq_lens": torch.randint(0, 20, (num_states,), generator=rng),
        "stop_token_ids": tokens(num_states, 2),
        "vocab_size": vocab_size,
    }


OPTIONAL = {name for names in PROCESSORS.values() for name in names}


def only(case, names):
    """The case with no other processor on."""
    return {name: value for name, value in case.items() if name not in OPTIONAL or name in names}


def reference(case, poison=77.0, gap=0.0):
    """With gap > 0 the selections keep a little less, with gap < 0 a little more."""
    case = dict(case)
    if case.get("top_ps") is not None:
        case["top_ps"] = torch.where(case["top_ps"] < 1, case["top_ps"] - gap, case["top_ps"])
    if case.get("min_ps") is not None:
        case["min_ps"] = case["min_ps"] * (1 + gap)
    output = torch.full(case["logits"].shape, poison)
    return process_logits_reference(**case, output=output)


def assert_processed(actual, case):
    """Values to float32's rounding; what is kept lies between the references a gap to each side."""
    actual = actual.cpu()
    least, most = reference(case, gap=GAP), reference(case, gap=-GAP)
    kept = actual > -torch.inf
    assert not actual.isnan().any()
    assert (kept | (least == -torch.inf)).all(), "dropped what must be kept"
    assert (~kept | (most > -torch.inf)).all(), "kept what must be dropped"
    torch.testing.assert_close(actual[kept], most[kept], rtol=2e-6, atol=2e-6)


def check(device, case):
    output, check_guards = guarded(case["logits"].shape, torch.float32, device)
    output.fill_(77.0)
    assert process_logits(**to_device(device, case), output=output) is output
    check_guards()
    assert_processed(output, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("names", PROCESSORS.values(), ids=PROCESSORS)
def test_process_logits_equals_reference(device, vocab_size, names):
    check(device, only(make_case(vocab_size), names))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns,vocab_size", [(40, 37), (1003, 1001), (49152, 49150)])
def test_dtypes_strides_and_padding(device, dtype, columns, vocab_size):
    """Padding columns are neither read nor written; rows of logits need not be aligned."""
    case = make_case(vocab_size, dtype, columns=columns)
    case["logits"][:, vocab_size:] = torch.inf
    check(device, case)
    wide = torch.full((len(case["logits"]), columns + 5), torch.nan, dtype=dtype)
    wide[:, 3 : 3 + columns] = case["logits"]
    moved = to_device(device, case) | {"logits": wide.to(device)[:, 3 : 3 + columns]}
    for name in ("token_counts", "draft_tokens", "stop_token_ids", "logit_bias_ids", "logit_bias"):
        moved[name] = torch.cat([moved[name]] * 2, dim=1)[:, : case[name].shape[1]]
    output = torch.full((len(wide), columns + 7), 77.0, device=device)
    process_logits(**moved, output=output[:, 2 : 2 + columns])
    assert_processed(output[:, 2 : 2 + columns], case)
    assert (output[:, :2] == 77).all() and (output[:, 2 + columns :] == 77).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [37, 49152])
def test_in_place(device, vocab_size):
    case = make_case(vocab_size)
    moved = to_device(device, case)
    expected = process_logits(**moved, output=moved["logits"].clone())
    assert process_logits(**moved, output=moved["logits"]) is moved["logits"]
    assert torch.equal(moved["logits"], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [37, 5000, 151936])
def test_rows_do_not_depend_on_the_batch(device, vocab_size):
    """Each request alone, and again 200 times over: the same bits."""
    case = to_device(device, make_case(vocab_size, torch.bfloat16))
    together = process_logits(**case)
    starts = case["logits_start_loc"].tolist()
    for r, s in enumerate(case["idx_mapping"].tolist()):
        begin, end = starts[r : r + 2]
        if s < 0 or begin == end:
            continue
        alone = case | {
            "logits": case["logits"][begin:end],
            "logits_positions": case["logits_positions"][begin:end],
            "logits_start_loc": torch.tensor([0, end - begin], dtype=torch.int32, device=device),
            "idx_mapping": case["idx_mapping"][r : r + 1],
        }
        for _ in range(200 if device == "cuda" else 2):
            assert torch.equal(process_logits(**alone), together[begin:end])


@pytest.mark.parametrize("device", DEVICES)
def test_many_requests(device):
    check(device, make_case(100, num_rows=[(3 * r) % 5 for r in range(2000)]))


def one_row(device, logits, temperature=1.0, **parameters):
    """The row processed for a request with these scalar parameters."""
    dtypes = {"top_ks": torch.int32, "min_seq_lens": torch.int64}
    logits = torch.as_tensor(logits, dtype=torch.float32, device=device)[None]
    return process_logits(
        logits,
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.tensor([9], device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, 0, dtype=torch.int64, device=device),
        torch.tensor([temperature], device=device),
        **{
            name: torch.tensor([value], dtype=dtypes.get(name, torch.float32), device=device)
            for name, value in parameters.items()
        },
    )[0].cpu()


def kept(row):
    return (row > -torch.inf).nonzero().flatten().tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_ties_are_kept(device):
    logits = [1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 0.0]
    assert kept(one_row(device, logits, top_ks=1)) == [1, 3]
    assert kept(one_row(device, logits, top_ks=2)) == [1, 3]
    assert kept(one_row(device, logits, top_ks=3)) == [1, 2, 3, 4, 5]
    assert kept(one_row(device, logits, top_ps=1e-9)) == [1, 3]
    assert kept(one_row(device, logits, top_ps=0.0)) == [1, 3]
    assert kept(one_row(device, logits, min_ps=1.0)) == [1, 3]
    assert kept(one_row(device, logits, min_ps=2.0)) == [1, 3]
    zeros = [-0.0, 0.0, -1.0]
    assert kept(one_row(device, zeros, top_ks=1)) == [0, 1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_equal_logits_are_all_kept(device, vocab_size):
    for parameters in ({"top_ks": 1}, {"top_ps": 0.3}, {"min_ps": 1.0}):
        row = one_row(device, torch.full((vocab_size,), 2.5), **parameters)
        assert torch.equal(row, torch.full((vocab_size,), 2.5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("top_k", [1, 2, 700, 9000, 49999])
def test_top_k_at_every_spread(device, scale, top_k):
    """From logits that differ in their last bits to logits far from the maximum."""
    logits = torch.randn(50000, generator=torch.Generator().manual_seed(1)) * scale + 0.5
    row = one_row(device, logits, top_ks=top_k)
    least = logits.sort(descending=True).values[top_k - 1]
    assert torch.equal(row, logits.masked_fill(logits < least, -torch.inf))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_at_every_spread(device, scale, top_p):
    logits = torch.randn(50000, generator=torch.Generator().manual_seed(2)) * scale + 0.5
    row = one_row(device, logits, top_ps=top_p)
    values, order = logits.double().sort(descending=True)
    above = values.softmax(0).cumsum(0) - values.softmax(0)
    above = above[torch.searchsorted(-values, -values)]  # of equals, as of the first
    ranked = (row > -torch.inf)[order]
    assert ranked[above < top_p - GAP].all()
    assert not ranked[above > top_p + GAP].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [37, 49152])
def test_rows_that_are_no_numbers(device, vocab_size):
    parameters = {"top_ks": 5, "top_ps": 0.9, "min_ps": 0.01}
    for value in (torch.nan, -torch.inf):
        row = torch.full((vocab_size,), value)
        for chosen in ({}, parameters):
            assert (one_row(device, row, 0.6, **chosen) == -torch.inf).all()
        row[31] = -1e30
        assert kept(one_row(device, row, 0.6, **parameters)) == [31]
    row[3], row[30] = torch.inf, torch.inf
    result = one_row(device, row, 0.6, **parameters)
    assert kept(result) == [3, 30]
    assert result.isfinite()[[3, 30]].all()


@pytest.mark.parametrize("device", DEVICES)
def test_row_i_counts_the_drafts_before_it(device):
    """One request of four rows over equal logits; draft 2 comes twice, -1 and 9 are no tokens."""
    row = process_logits(
        torch.ones(5, 6, device=device),
        torch.tensor([0, 5], dtype=torch.int32, device=device),
        torch.arange(5, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.tensor([[2, 5, 2, -1]], device=device),
        torch.zeros(1, device=device),
        repetition_penalties=torch.tensor([2.0], device=device),
        frequency_penalties=torch.tensor([0.25], device=device),
        presence_penalties=torch.tensor([4.0], device=device),
        token_counts=torch.tensor([[0, 3, 0, IN_PROMPT, 0, IN_PROMPT + 1]], device=device).int(),
    )
    seen, once = 1 / 2, 1 / 2 - 0.25 - 4
    expected = [
        [1, seen - 0.75 - 4, 1, seen, 1, once],
        [1, seen - 0.75 - 4, once, seen, 1, once],
        [1, seen - 0.75 - 4, once, seen, 1, once - 0.25],
        [1, seen - 0.75 - 4, once - 0.25, seen, 1, once - 0.25],
        [1, seen - 0.75 - 4, once - 0.25, seen, 1, once - 0.25],
    ]
    assert row.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_stop_tokens_wait_for_min_seq_len(device):
    """The token of a row at position p stands at p + 1."""
    stop_token_ids = torch.tensor([[2, -1]], device=device)
    for min_seq_len, banned in ((10, False), (11, True)):
        row = process_logits(
            torch.tensor([[0.0, 1.0, 2.0]], device=device),
            torch.tensor([0, 1], dtype=torch.int32, device=device),
            torch.tensor([9], device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(1, 0, dtype=torch.int64, device=device),
            torch.zeros(1, device=device),
            min_seq_lens=torch.tensor([min_seq_len], device=device),
            stop_token_ids=stop_token_ids,
        )
        assert row.tolist() == [[0.0, 1.0, -torch.inf if banned else 2.0]]
