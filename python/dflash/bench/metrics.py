# SPDX-License-Identifier: Apache-2.0
"""Figures of one measurement from the records of its requests: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from dflash.bench.load import Record
from dflash.engine.statistics import Statistics

DEFINITIONS = (
    "TTFT: arrival to first token. ITL: the gap between two chunks of tokens, one gap however many "
    "tokens the later chunk holds. TPOT: (last - first token) / (tokens - 1). E2E: arrival to last token."
)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles in milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """One measurement. Tokens, times and AL are those of answered requests; duration is first arrival to last end."""

    num_requests: int
    num_failed: int
    first_error: str | None
    duration_seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    tokens_per_second: float
    requests_per_second: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    acceptance_length: float
    acceptance_by_position: list[float]

    @property
    def num_answered(self) -> int:
        return self.num_requests - self.num_failed


def summarize(records: Sequence[Record]) -> Summary:
    """Requests that were cut off (neither answered nor failed) are left out."""
    answered = [record for record in records if record.output is not None and not record.error]
    errors = [record.error for record in records if record.error]
    ends = [r.finished for r in records if r.finished is not None and (r.output or r.error)]
    duration = max(ends) - min(record.arrival for record in records) if ends else 0.0
    num_output_tokens = sum(_num_tokens(record) for record in answered)
    statistics = total_statistics(answered)
    return Summary(
        num_requests=len(answered) + len(errors),
        num_failed=len(errors),
        first_error=errors[0] if errors else None,
        duration_seconds=duration,
        num_prompt_tokens=sum(len(record.output.prompt_token_ids) for record in answered),
        num_cached_tokens=statistics.num_cached_tokens,
        num_output_tokens=num_output_tokens,
        num_preemptions=statistics.num_preemptions,
        tokens_per_second=num_output_tokens / duration if duration else 0.0,
        requests_per_second=len(answered) / duration if duration else 0.0,
        ttft_ms=spread([r.chunks[0][0] - r.arrival for r in answered if r.chunks]),
        itl_ms=spread([gap for record in answered for gap in _gaps(record)]),
        tpot_ms=spread([_time_per_token(r) for r in answered if _num_tokens(r) > 1]),
        e2e_ms=spread([r.chunks[-1][0] - r.arrival for r in answered if r.chunks]),
        acceptance_length=statistics.acceptance_length,
        acceptance_by_position=statistics.acceptance_by_position if statistics.num_drafts else [],
    )


def total_statistics(records: Sequence[Record]) -> Statistics:
    """Of all answered requests."""
    total = Statistics()
    for record in records:
        if record.output is not None:
            total.add(record.output.statistics)
    return total


def spread(seconds: Sequence[float]) -> Spread | None:
    """None where there is nothing to take a percentile of."""
    if not seconds:
        return None
    ms = sorted(1e3 * value for value in seconds)
    return Spread(fmean(ms), percentile(ms, 50), percentile(ms, 99))


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as numpy's default."""
    rank = (len(ascending) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (rank - below) * (ascending[above] - ascending[below])


def _num_tokens(record: Record) -> int:
    return sum(count for _, count in record.chunks)


def _gaps(record: Record) -> list[float]:
    times = [time for time, _ in record.chunks]
    return [b - a for a, b in pairwise(times)]


def _time_per_token(record: Record) -> float:
    return (record.chunks[-1][0] - record.chunks[0][0]) / (_num_tokens(record) - 1)
