# SPDX-License-Identifier: Apache-2.0
"""Runs every load level on every side, in turn, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dflash.bench.load import ClosedLoop, Load, Record, run_load
from dflash.bench.metrics import Summary, summarize

MAX_WARMUP_TOKENS = 16


@dataclass(frozen=True)
class Side:
    """An LLM with, or without, its drafter, and what it is asked."""

    llm: Any
    with_draft: bool
    prompts: Sequence[Any]
    params: Sequence[Any]


@dataclass
class Measurement:
    """One side at one load level; records of requests that have not ended are there too."""

    load: Load
    with_draft: bool
    num_prompts: int
    records: list[Record] = field(default_factory=list)

    @property
    def summary(self) -> Summary:
        return summarize(self.records)

    @property
    def complete(self) -> bool:
        return self.summary.num_requests == self.num_prompts

    def __str__(self) -> str:
        return f"{self.load}, {'with' if self.with_draft else 'without'} drafter"


async def measure_all(
    sides: Sequence[Side],
    loads: Sequence[Load],
    num_warmup: int | None,
    measurements: list[Measurement],
    on_start: Callable[[Measurement], None] = lambda _: None,
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Appends to `measurements` as they begin: an interrupt leaves what was measured so far.

    The sides take turns at each level, so that a machine that slows down slows both.
    """
    for load in loads:
        for side in sides:
            measurement = Measurement(load, side.with_draft, len(side.prompts))
            on_start(measurement)
            await _warm_up(side, load, num_warmup)
            measurements.append(measurement)
            await run_load(side.llm, load, side.prompts, side.params, measurement.records, on_end)


def measure_with_progress(
    sides: Sequence[Side], loads: Sequence[Load], num_warmup: int | None
) -> tuple[list[Measurement], bool]:
    """measure_all under a progress bar on stderr; returns also whether Ctrl-C cut it short."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    measurements: list[Measurement] = []
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(loads) * sum(len(side.prompts) for side in sides))
        work = measure_all(
            sides,
            loads,
            num_warmup,
            measurements,
            on_start=lambda m: progress.update(task, description=str(m)),
            on_end=lambda: progress.advance(task),
        )
        try:
            asyncio.run(work)
        except KeyboardInterrupt:
            return measurements, True
    return measurements, False


async def _warm_up(side: Side, load: Load, num_warmup: int | None) -> None:
    """The first requests, cut short, as many at once as the level has: not counted."""
    concurrency = load.concurrency if isinstance(load, ClosedLoop) else 1
    count = concurrency if num_warmup is None else num_warmup
    chosen = [i % len(side.prompts) for i in range(count)]
    params = [
        replace(side.params[i], max_tokens=min(side.params[i].max_tokens, MAX_WARMUP_TOKENS))
        for i in chosen
    ]
    prompts = [side.prompts[i] for i in chosen]
    await run_load(side.llm, ClosedLoop(concurrency), prompts, params, [])
