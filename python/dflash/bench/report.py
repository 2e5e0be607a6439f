# SPDX-License-Identifier: Apache-2.0
"""What was measured, as figures for json and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from dflash.bench.load import ClosedLoop
from dflash.bench.metrics import DEFINITIONS, Spread, total_statistics
from dflash.bench.runner import Measurement
from dflash.engine.statistics import Statistics

REPORT_WIDTH = 100
MAX_TABLE_WIDTH = 160
"""Figures of uncommon length make the table wider than the report: none is cut."""


def title_of(setup: dict) -> str:
    """What was measured, in one line."""
    pair = setup["model"]
    if setup["draft"]:
        pair += f" + {setup['draft']} (N = {setup['num_speculative_tokens']})"
        if setup.get("draft_quantization"):
            pair += f" in {setup['draft_quantization']}"
    names = ("temperature", "top_p", "top_k")
    sampling = ", ".join(f"{name} {setup[name]:g}" for name in names if setup[name] is not None)
    sampling = sampling if setup["temperature"] else "greedy"
    threads = (
        f", {setup['threads']} thread{'s' * (setup['threads'] > 1)}" if setup["threads"] else ""
    )
    return (
        f"{pair} | {setup['num_prompts']} x {setup['dataset']}, max_tokens {setup['max_tokens']}, "
        f"{sampling} | {setup['dtype']}, {setup['device']}{threads}"
    )


def figures_of(setup: dict, measurements: Sequence[Measurement], interrupted: bool) -> dict:
    """For json: what was run, and every measurement."""
    return setup | {
        "interrupted": interrupted,
        "definitions": DEFINITIONS,
        "measurements": [
            {
                "concurrency": m.load.level if isinstance(m.load, ClosedLoop) else None,
                "request_rate": None if isinstance(m.load, ClosedLoop) else m.load.level,
                "with_draft": m.with_draft,
                "complete": m.complete,
                "speedup": speedup(m, measurements),
            }
            | asdict(m.summary)
            for m in measurements
        ],
    }


def speedup(measurement: Measurement, measurements: Sequence[Measurement]) -> float | None:
    """Output tokens a second over those of the drafter-less side at the same level; None without both."""
    for other in measurements:
        if not measurement.with_draft or other.with_draft or other.load != measurement.load:
            continue
        plain = other.summary.tokens_per_second
        if plain and measurement.complete and other.complete:
            return measurement.summary.tokens_per_second / plain
    return None


def drafting(measurements: Sequence[Measurement]) -> Statistics:
    """Drafts and accepted tokens over all levels with drafter."""
    return total_statistics([r for m in measurements if m.with_draft for r in m.records])


def print_report(
    file: TextIO, title: str, measurements: Sequence[Measurement], interrupted: bool = False
) -> None:
    console = Console(file=file, width=MAX_TABLE_WIDTH, markup=False, highlight=False)
    console.print(title, style="bold", width=REPORT_WIDTH)
    console.print(_table(measurements))
    console.print()
    lines = [DEFINITIONS]
    statistics = drafting(measurements)
    if statistics.num_drafts:
        shares = " ".join(f"{share:.2f}" for share in statistics.acceptance_by_position)
        lines.insert(0, f"accepted by position: {shares} (AL {statistics.acceptance_length:.2f})")
    lines += _troubles(measurements)
    if interrupted:
        lines.append("interrupted: what is not in the table was not measured")
    for line in lines:
        console.print(line, width=REPORT_WIDTH)


def _table(measurements: Sequence[Measurement]) -> Table:
    closed = isinstance(measurements[0].load, ClosedLoop)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (
        "concurrency" if closed else "requests/s", "drafter", "tok/s", "speed-up", "AL",
        "TTFT ms\np50 / p99", "ITL ms\np50 / p99", "TPOT ms\nmean", "E2E s\np50 / p99",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "drafter" else "right", no_wrap=True)
    for i, m in enumerate(measurements):
        summary, gain = m.summary, speedup(m, measurements)
        last_of_level = i + 1 == len(measurements) or measurements[i + 1].load != m.load
        table.add_row(
            f"{m.load.level:g}",
            "with" if m.with_draft else "without",
            _short(summary.tokens_per_second) if summary.num_answered else "-",
            f"{gain:.2f}x" if gain else "",
            f"{summary.acceptance_length:.2f}" if summary.acceptance_by_position else "",
            _percentiles(summary.ttft_ms),
            _percentiles(summary.itl_ms),
            _short(summary.tpot_ms.mean) if summary.tpot_ms else "-",
            _percentiles(summary.e2e_ms, 1e-3),
            end_section=last_of_level,
        )
    return table


def _percentiles(spread: Spread | None, scale: float = 1.0) -> str:
    return f"{_short(spread.p50 * scale)} / {_short(spread.p99 * scale)}" if spread else "-"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _troubles(measurements: Sequence[Measurement]) -> list[str]:
    """What a reader must know before believing the table."""
    lines = []
    for m in measurements:
        s = m.summary
        if s.num_failed:
            lines.append(f"{m}: {s.num_failed} of {s.num_requests} failed: {s.first_error}")
        if not m.complete:
            lines.append(f"{m}: cut off after {s.num_requests} of {m.num_prompts} requests")
    return lines
