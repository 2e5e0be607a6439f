# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.process_logits import IN_PROMPT, process_logits, process_logits_reference

from .support import DEVICES, DTYPES, check_op, guarded, to_device

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


def qwen3_batch(num_rows=4, vocab_size=151936):
    """Rows like a language model's, and the ids of a prompt of 40 tokens and an answer of 60."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, vocab_size, generator=rng) * 3
    peaks = torch.randint(0, vocab_size, (num_rows, 100), generator=rng)
    logits.scatter_(1, peaks, 12 + torch.randn(num_rows, 100, generator=rng) * 4)
    ids = torch.where(
        torch.rand(num_rows, 100, generator=rng) < 0.5,
        peaks,
        torch.randint(0, vocab_size, (num_rows, 100), generator=rng),
    )
    ids[:, 50:60] = ids[:, 45:46]
    return logits, ids


def counts_of(ids, prompt_len, vocab_size):
    counts = torch.zeros(len(ids), vocab_size, dtype=torch.int32)
    counts.scatter_add_(1, ids[:, prompt_len:], torch.ones_like(ids[:, prompt_len:]).int())
    in_prompt = torch.zeros(len(ids), vocab_size, dtype=torch.bool)
    in_prompt.scatter_(1, ids[:, :prompt_len], True)
    return counts | in_prompt.int() * IN_PROMPT


def process_rows(device, logits, temperature=1.0, **parameters):
    """A request of one row for each row; scalar parameters are those of every request."""
    num_rows = len(logits)
    values = {
        name: value
        if isinstance(value, torch.Tensor)
        else torch.full((num_rows,), value, dtype=torch.int32 if name == "top_ks" else None)
        for name, value in parameters.items()
    }
    return process_logits(
        logits.to(device),
        torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        torch.arange(num_rows, device=device),
        torch.arange(num_rows, dtype=torch.int32, device=device),
        torch.zeros(num_rows, 0, dtype=torch.int64, device=device),
        torch.full((num_rows,), temperature, device=device),
        **to_device(device, values),
    ).cpu()


def assert_agrees(actual, expected, mass):
    """Equal values; tokens that only one of them keeps weigh no more than `mass`."""
    both = (actual > -torch.inf) & (expected > -torch.inf)
    torch.testing.assert_close(actual[both], expected[both], rtol=1e-6, atol=1e-6)
    one = (actual > -torch.inf) ^ (expected > -torch.inf)
    probabilities = torch.maximum(actual, expected).double().softmax(-1)
    assert (probabilities * one).sum(-1).max() <= mass


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "chain",
    ["temperature", "top_k", "top_p", "min_p", "repetition", "qwen3", "qwen3 + repetition"],
)
def test_agrees_with_transformers(device, chain):
    import transformers as hf

    logits, ids = qwen3_batch()
    repetition = hf.RepetitionPenaltyLogitsProcessor(1.3)
    penalized = {
        "repetition_penalties": 1.3,
        "token_counts": counts_of(ids, 40, logits.shape[1]),
    }
    qwen3 = [hf.TemperatureLogitsWarper(0.6), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.95)]
    processors, parameters, mass = {
        "temperature": ([hf.TemperatureLogitsWarper(0.6)], {"temperature": 0.6}, 0.0),
        "top_k": ([hf.TopKLogitsWarper(20)], {"top_ks": 20}, 0.0),
        # transformers sums the mass of the whole vocabulary in float32.
        "top_p": ([hf.TopPLogitsWarper(0.95)], {"top_ps": 0.95}, 1e-4),
        "min_p": ([hf.MinPLogitsWarper(0.02)], {"min_ps": 0.02}, 0.0),
        "repetition": ([repetition], penalized, 0.0),
        "qwen3": (qwen3, {"temperature": 0.6, "top_ks": 20, "top_ps": 0.95}, 0.0),
        "qwen3 + repetition": (
            [repetition, *qwen3],
            {"temperature": 0.6, "top_ks": 20, "top_ps": 0.95, **penalized},
            0.0,
        ),
    }[chain]
    expected = logits.clone()
    for processor in processors:
        expected = processor(ids, expected)
    assert_agrees(process_rows(device, logits, **parameters), expected, mass)


@pytest.mark.parametrize("device", DEVICES)
def test_frequency_and_presence_are_their_formula(device):
    logits, ids = qwen3_batch()
    counts = torch.zeros_like(logits).scatter_add_(1, ids[:, 40:], torch.ones(len(ids), 60))
    actual = process_rows(
        device,
        logits,
        temperature=0.0,
        frequency_penalties=0.3,
        presence_penalties=0.7,
        token_counts=counts_of(ids, 40, logits.shape[1]),
    )
    expected = logits - 0.3 * counts - 0.7 * (counts > 0)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_2_to_the_31_elements(device):
    stride, vocab_size = 2**31 + 64, 8
    rows = torch.empty(stride + vocab_size, dtype=torch.float16, device=device)
    logits = rows.as_strided((2, vocab_size), (stride, 1))
    logits.copy_(torch.arange(16).view(2, vocab_size))
    columns = torch.empty(stride + vocab_size, dtype=torch.float32, device=device)
    output = columns.as_strided((2, vocab_size), (stride, 1))
    process_logits(
        logits,
        torch.tensor([0, 1, 2], dtype=torch.int32, device=device),
        torch.tensor([4, 9], device=device),
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.zeros(2, 0, dtype=torch.int64, device=device),
        torch.tensor([0.0, 2.0], device=device),
        top_ks=torch.tensor([2, 2], dtype=torch.int32, device=device),
        output=output,
    )
    dropped = [-torch.inf] * 6
    assert output.tolist() == [list(range(8)), [*dropped, 7.0, 7.5]]


@pytest.mark.parametrize("device", DEVICES)
def test_empty_batches(device):
    case = make_case(5, num_rows=[])
    case["logits"], case["logits_positions"] = case["logits"][:0], case["logits_positions"][:0]
    assert process_logits(**to_device(device, case)).shape == (0, 5)
    check(device, make_case(5, num_rows=[0, 0]))


def arguments(**change):
    """Valid arguments, with some changed."""
    case = make_case(5) | change
    return {name: value for name, value in case.items() if value is not None}


@pytest.mark.parametrize(
    "change,message",
    [
        ({"vocab_size": 0}, r"vocab_size: expected 1 to 5 \(the columns of logits\), got 0"),
        ({"vocab_size": 6}, r"vocab_size: expected 1 to 5 \(the columns of logits\), got 6"),
        ({"token_counts": None}, "token_counts: required by penalties"),
        ({"logit_bias": None}, "logit_bias: expected together with logit_bias_ids"),
        ({"logit_bias_ids": None}, "logit_bias: expected together with logit_bias_ids"),
        ({"stop_token_ids": None}, "stop_token_ids: required by min_seq_lens"),
    ],
)
def test_value_errors(change, message):
    with pytest.raises(ValueError, match=message):
        process_logits(**arguments(**change))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"logits": torch.zeros(14, 5, dtype=torch.int32)}, "logits: expected float32, float16 or"),
        ({"logits": torch.zeros(5, 14).t()}, "logits: the last dimension must be contiguous"),
        ({"output": torch.zeros(14, 4)}, "output: expected at least vocab_size = 5 columns, got 4"),
        ({"output": torch.zeros(14, 5).half()}, "output: expected float32, got float16"),
        ({"output": torch.zeros(3, 5)}, r"output: expected shape \[14, \*\], got \[3, 5\]"),
        ({"logits_start_loc": torch.zeros(5).int()}, r"logits_start_loc: expected shape \[6\]"),
        ({"logits_positions": torch.zeros(14).int()}, "logits_positions: expected int64"),
        ({"draft_tokens": torch.zeros(6, 3).long()}, r"draft_tokens: expected shape \[7, \*\]"),
        ({"top_ks": torch.zeros(7).long()}, "top_ks: expected int32, got int64"),
        ({"top_ps": torch.zeros(6)}, r"top_ps: expected shape \[7\], got \[6\]"),
        ({"min_ps": torch.zeros(7).half()}, "min_ps: expected float32, got float16"),
        (
            {"token_counts": torch.zeros(7, 4).int()},
            "token_counts: expected at least vocab_size = 5 columns, got 4",
        ),
        ({"logit_bias": torch.zeros(7, 3)}, r"logit_bias: expected shape \[7, 4\], got \[7, 3\]"),
        ({"min_seq_lens": torch.zeros(7).int()}, "min_seq_lens: expected int64, got int32"),
        ({"stop_token_ids": torch.zeros(2, 2).long()}, r"stop_token_ids: expected shape \[7, \*\]"),
    ],
)
def test_runtime_errors(change, message):
    with pytest.raises(RuntimeError, match=message):
        process_logits(**arguments(**change))


@pytest.mark.parametrize("names", ["temperature", "all"])
def test_opcheck(names):
    case = only(make_case(9), PROCESSORS[names])
    values = [
        case.get(argument.name)
        for argument in torch.ops.dflash.process_logits.default._schema.arguments
    ]
    values[-1] = torch.zeros(case["logits"].shape)
    check_op(torch.ops.dflash.process_logits.default, tuple(values))
