# SPDX-License-Identifier: Apache-2.0
"""lm_head_sample where one kernel makes no logits."""

import pytest
import torch

from dflash.ops.linear import linear
from dflash.ops.lm_head_sample import lm_head_sample, lm_head_sample_plan
from dflash.ops.sample_draft import sample_draft

from .support import to_device
from .test_lm_head_sample import RELATIVE_GAP, make_verified

FUSED_DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [17, 40, 128, 256, 512])
@pytest.mark.parametrize("with_temperatures", [False, True])
def test_the_first_of_equal_maxima_wins_in_every_row(rows, with_temperatures):
    """In a thread's first columns and its second, either half of a tile, a CTA's next tile, the last column."""
    vocab_size = 131 * 192 + 61
    weight = torch.zeros(vocab_size, 64, dtype=torch.bfloat16, device="cuda")
    hidden = torch.ones(rows, 64, dtype=torch.bfloat16, device="cuda")
    assert lm_head_sample_plan(hidden, weight) is not None
    states = torch.arange(rows, dtype=torch.int32, device="cuda")
    zeros = torch.zeros(rows, dtype=torch.int64, device="cuda")
    options = {"temperatures": zeros.float(), "seeds": zeros} if with_temperatures else {}
    for first in (0, 7, 8, 15, 16, 95, 96, 191, 6335, 6336, 12671, 12672, vocab_size - 1):
        weight[:first], weight[first:] = 0.0, 0.5
        tokens = torch.full((rows, 1), -7, device="cuda")
        lm_head_sample(hidden, weight, zeros, states, tokens, **options)
        assert tokens.eq(first).all(), first


def make_fused(rows, vocab_size=9001, size=328, dtype=torch.bfloat16, padding=15):
    """Verified rows of requests of 5, on the GPU; the padded request has none."""
    counts = [5] * (rows // 5) + [rows % 5, 0]
    case = make_verified(counts, vocab_size + padding, size, dtype, vocab_size)
    case["hidden_states"], case["positions"] = (
        case["hidden_states"][:rows],
        case["positions"][:rows],
    )
    return to_device("cuda", case)


@pytest.mark.gpu
def test_plan_names_what_is_fused():
    x, weight = make_fused(5)["hidden_states"], make_fused(5)["weight"]
    assert lm_head_sample_plan(x, weight) == (16, 3, 1)
    assert lm_head_sample_plan(x, weight[:8448]) is None
    assert lm_head_sample_plan(x[:1].expand(129, -1).contiguous(), weight) is None
    assert lm_head_sample_plan(x.float(), weight.float()) is None
    assert lm_head_sample_plan(x[:, 1:321], weight[:, 1:321]) is None
    with pytest.raises(RuntimeError, match=r"vocab_size: expected 1 to 9016 .*, got 9017"):
        lm_head_sample_plan(x, weight, 9017)


@pytest.mark.gpu
def test_plan_counts_full_blocks_of_rows_and_tiles_of_the_vocabulary():
    weight = torch.zeros(132 * 192, 64, dtype=torch.bfloat16, device="cuda")
    for rows in (225, 240, 256, 449, 512):
        assert lm_head_sample_plan(weight[:rows], weight) == (128, 3, 1), rows
        assert lm_head_sample_plan(weight[:rows], weight, 131 * 192 + 1) == (128, 3, 1), rows
        assert lm_head_sample_plan(weight[:rows], weight, 9000) is None, rows
    for rows in (129, 224, 257, 448, 513):
        assert lm_head_sample_plan(weight[:rows], weight) is None, rows


def sums_of(hidden, weight):
    """linear's in fp32, 128 rows a call."""
    logits = torch.empty(len(hidden), len(weight), device="cuda")
    for rows, output in zip(hidden.split(128), logits.split(128), strict=True):
        linear(rows, weight, None, output)
    return logits


FEW_ROWS = [
    (rows, *shape)
    for rows in (1, 2, 15, 16, 17, 31, 33, 64, 65, 100, 128)
    for shape in ((9001, 328), (8449, 8), (26000, 1096))
]
ROW_BLOCKS = [
    (rows, *shape) for rows in (226, 240, 256, 449, 512) for shape in ((25213, 1096), (24001, 8))
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FUSED_DTYPES)
@pytest.mark.parametrize("rows,vocab_size,size", FEW_ROWS + ROW_BLOCKS)
def test_fused_equals_its_two_ops(dtype, rows, vocab_size, size):
    """Bit for bit the sums of linear: the same tokens as from logits in fp32, of both kinds of rows."""
    case = make_fused(rows, vocab_size, size, dtype)
    hidden, weight = case["hidden_states"], case["weight"]
    assert lm_head_sample_plan(hidden, weight, vocab_size) is not None
    logits = sums_of(hidden, weight)
    greedy = {"tokens": torch.full((rows,), -7, device="cuda"), **case, "temperatures": None}
    lm_head_sample(**greedy)
    assert torch.equal(greedy["tokens"], logits[:, :vocab_size].argmax(-1))
    states = torch.arange(rows, dtype=torch.int32, device="cuda").flip(0)
    draft = {
        "temperatures": torch.tensor([0.0, 0.7, 1.3], device="cuda").repeat(rows)[:rows],
        "seeds": torch.arange(rows, device="cuda") * 12345,
        "vocab_size": vocab_size,
        "logit_scale": 0.5,
    }
    expected, actual = (torch.full((rows, 1), -7, device="cuda") for _ in range(2))
    sample_draft(logits, case["positions"], states, expected, **draft)
    lm_head_sample(hidden, weight, case["positions"], states, actual, **draft)
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 128, 256, 480])
def test_fused_at_the_size_of_qwen3(rows):
    case = make_fused(rows, 151669, 4096, padding=267)
    tokens = torch.full((rows,), -7, device="cuda")
    lm_head_sample(tokens=tokens, **case)
    logits = sums_of(case["hidden_states"], case["weight"])
    exact = case["hidden_states"].double() @ case["weight"].double().T
    for j, state in enumerate(case["idx_mapping"].repeat_interleave(5)[:rows].tolist()):
        if state < 0 or case["temperatures"][state] > 0:
            continue
        assert tokens[j] == logits[j, :151669].argmax()
        gap = (
            RELATIVE_GAP
            * case["hidden_states"][j].double().norm()
            * case["weight"].float().norm(dim=1).max()
        )
        assert exact[j, :151669].max() - exact[j, tokens[j]] <= gap


@pytest.mark.gpu
@pytest.mark.parametrize("size", [328, 1096])
def test_fused_row_does_not_depend_on_the_others(size):
    case = make_fused(128, 26000, size)
    states = torch.arange(128, dtype=torch.int32, device="cuda")
    options = {
        "temperatures": torch.tensor([0.0, 1.0], device="cuda").repeat(64),
        "seeds": torch.arange(128, device="cuda"),
    }

    def sample(rows):
        tokens = torch.full((128, 1), -7, device="cuda")
        lm_head_sample(
            case["hidden_states"][rows],
            case["weight"],
            case["positions"][rows],
            states[rows],
            tokens,
            **options,
        )
        return tokens[rows]

    together = sample(slice(0, 128))
    for rows in (slice(0, 1), slice(0, 16), slice(3, 20), slice(40, 104), slice(1, 128)):
        assert torch.equal(sample(rows), together[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows,vocab_size", [(16, 30011), (128, 30011), (240, 25213), (512, 25213)])
def test_fused_repeats_are_equal_whatever_the_workspace_held(rows, vocab_size):
    """Trap 27."""
    case = make_fused(rows, vocab_size, 520)
    first = lm_head_sample(tokens=torch.full((rows,), -7, device="cuda"), **case)
    tokens = torch.empty_like(first)
    for i in range(1000):
        # The allocator gives the same memory to the op's workspace.
        torch.full((rows * 132,), -1 - i % 2, dtype=torch.int64, device="cuda")
        tokens.fill_(-7)
        lm_head_sample(tokens=tokens, **case)
        assert torch.equal(tokens, first), i


@pytest.mark.gpu
def test_fused_in_a_graph_reads_what_was_just_written():
    """Hidden states, positions and maps are written right before, 20 times in a graph, replayed with others."""
    case = make_fused(16, 30011, 520)
    case["temperatures"] = case["temperatures"].clamp(min=0.5)
    source, hidden = torch.zeros_like(case["hidden_states"]), case["hidden_states"]
    offset, positions = torch.zeros_like(case["positions"]), case["positions"]
    outputs = [torch.empty_like(positions) for _ in range(20)]

    def chain():
        for i, tokens in enumerate(outputs):
            torch.mul(source, 1.0 + i, out=hidden)
            torch.add(offset, i, out=positions)
            lm_head_sample(tokens=tokens, **case)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for replay in range(3):
        source.copy_(torch.randn_like(source))
        offset.fill_(100 * replay)
        graph.replay()
        torch.cuda.synchronize()
        for i, tokens in enumerate(outputs):
            alone = case | {"hidden_states": source * (1.0 + i), "positions": offset + i}
            torch.cuda.synchronize()
            assert torch.equal(tokens, lm_head_sample(tokens=torch.empty_like(tokens), **alone))
