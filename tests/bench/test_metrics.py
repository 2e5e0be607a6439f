# SPDX-License-Identifier: Apache-2.0
"""Figures from records whose figures are known."""

from types import SimpleNamespace

import numpy as np
import pytest

from dflash.bench.load import Record
from dflash.bench.metrics import Spread, percentile, spread, summarize
from dflash.engine.statistics import Statistics


def answered(arrival, chunks, steps=(), prompt=3):
    """`steps`: (drafts, committed) of each verify pass."""
    statistics = Statistics(num_requests=1)
    for num_draft, num_sampled in steps:
        statistics.record_step(num_draft, num_sampled, 0.1)
    output = SimpleNamespace(prompt_token_ids=[0] * prompt, statistics=statistics)
    return Record(arrival, chunks, finished=chunks[-1][0], output=output)


def test_one_request():
    record = answered(10.0, [(10.5, 1), (10.7, 4), (11.1, 2)], [(3, 4), (3, 2)])
    summary = summarize([record])
    assert summary.duration_seconds == pytest.approx(1.1)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (3, 7)
    assert summary.tokens_per_second == pytest.approx(7 / 1.1)
    assert summary.requests_per_second == pytest.approx(1 / 1.1)
    assert summary.ttft_ms.mean == summary.ttft_ms.p99 == pytest.approx(500)
    # A chunk of several tokens is one gap: 200 and 400 ms.
    assert (summary.itl_ms.p50, summary.itl_ms.p99) == pytest.approx((300, 398))
    assert summary.tpot_ms.mean == pytest.approx(600 / 6)
    assert summary.e2e_ms.mean == pytest.approx(1100)
    assert summary.acceptance_length == pytest.approx(1 + 4 / 2)
    assert summary.acceptance_by_position == pytest.approx([1.0, 0.5, 0.5])


def test_duration_spans_all_requests_and_acceptance_weighs_drafts():
    a = answered(0.0, [(1.0, 1), (4.0, 3)], [(2, 3)])
    b = answered(2.0, [(3.0, 1), (8.0, 1), (9.0, 1)], [(2, 1), (2, 1)])
    b.output.statistics.num_cached_tokens, b.output.statistics.num_preemptions = 16, 1
    summary = summarize([a, b])
    assert summary.duration_seconds == pytest.approx(9.0)
    assert summary.tokens_per_second == pytest.approx(7 / 9)
    assert (summary.num_cached_tokens, summary.num_preemptions) == (16, 1)
    assert summary.acceptance_length == pytest.approx(1 + 2 / 3)
    assert summary.acceptance_by_position == pytest.approx([1 / 3, 1 / 3])


def test_failed_and_cut_off_requests():
    failed = Record(0.0, [(1.0, 1)], finished=2.0, error="ValueError: no")
    cut_off = Record(0.5, [(1.5, 1)])
    summary = summarize([answered(0.0, [(1.0, 1), (3.0, 1)]), failed, cut_off])
    assert (summary.num_requests, summary.num_failed, summary.first_error) == (
        2,
        1,
        "ValueError: no",
    )
    assert summary.num_output_tokens == 2
    assert summary.duration_seconds == pytest.approx(3.0)
    assert summary.acceptance_by_position == []


@pytest.mark.parametrize("records", [[], [Record(0.0, finished=1.0, error="x")], [Record(0.0)]])
def test_nothing_answered(records):
    summary = summarize(records)
    assert summary.num_answered == summary.tokens_per_second == summary.requests_per_second == 0
    assert summary.ttft_ms is summary.itl_ms is summary.tpot_ms is summary.e2e_ms is None


def test_one_token_has_no_time_per_token():
    summary = summarize([answered(0.0, [(1.0, 1)])])
    assert summary.tpot_ms is summary.itl_ms is None
    assert summary.e2e_ms == Spread(1000, 1000, 1000)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 50, 99, 100])
def test_percentiles_are_numpys(count, percent):
    values = np.sort(np.random.default_rng(count).random(count))
    assert percentile(list(values), percent) == pytest.approx(np.percentile(values, percent))


def test_spread_sorts_and_scales():
    found = spread([0.3, 0.1, 0.2])
    assert (found.mean, found.p50, found.p99) == pytest.approx((200, 200, 298))
    assert spread([]) is None
