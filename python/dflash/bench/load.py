# SPDX-License-Identifier: Apache-2.0
"""When requests arrive, and what is noted of each: times of the running event loop, in seconds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

Send = Callable[[int, float], Awaitable[None]]
"""(request, when it arrived): returns when it is answered."""


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` clients: each sends its next request when the last one is answered."""

    concurrency: int

    @property
    def level(self) -> float:
        return self.concurrency

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"

    async def drive(self, num_requests: int, send: Send) -> None:
        waiting = iter(range(num_requests))

        async def client() -> None:
            for i in waiting:
                await send(i, asyncio.get_running_loop().time())

        await asyncio.gather(*(client() for _ in range(min(self.concurrency, num_requests))))


@dataclass(frozen=True)
class PoissonArrivals:
    """Requests arrive whether or not earlier ones are answered: `request_rate` a second, the same for one seed."""

    request_rate: float
    seed: int = 0

    @property
    def level(self) -> float:
        return self.request_rate

    def __str__(self) -> str:
        return f"{self.request_rate:g} requests/s"

    def arrivals(self, num_requests: int) -> list[float]:
        """Seconds after the first."""
        rng, times = random.Random(self.seed), [0.0]
        while len(times) < num_requests:
            times.append(times[-1] + rng.expovariate(self.request_rate))
        return times[:num_requests]

    async def drive(self, num_requests: int, send: Send) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def later(i: int, arrival: float) -> None:
            await asyncio.sleep(arrival - loop.time())
            # A busy loop wakes late: the request waits from when it was due.
            await send(i, arrival)

        arrivals = self.arrivals(num_requests)
        await asyncio.gather(*(later(i, started + arrivals[i]) for i in range(num_requests)))


Load = ClosedLoop | PoissonArrivals


def parse_loads(
    concurrency: Sequence[str] | None, request_rate: Sequence[str] | None, seed: int
) -> list[Load]:
    """Load levels as they are typed ("1,2", "4"), each once; one request at a time when nothing is given.

    Raises:
        ValueError: both are given, or something that is no number above 0.
    """
    if concurrency and request_rate:
        raise ValueError("give --concurrency or --request-rate, not both")
    if request_rate:
        rates = _numbers("--request-rate", request_rate, float, "numbers")
        return [PoissonArrivals(rate, seed) for rate in rates]
    counts = _numbers("--concurrency", concurrency or ["1"], int, "whole numbers")
    return [ClosedLoop(count) for count in counts]


def _numbers(option: str, texts: Sequence[str], kind: type, expected: str) -> list[Any]:
    words = ",".join(texts).split(",")
    try:
        numbers = [kind(word) for word in words]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"{option} {','.join(words)}: expected {expected} above 0")
    return list(dict.fromkeys(numbers))


@dataclass
class Record:
    """One request: when it arrived, when tokens came and how many; output None: failed, or cut off."""

    arrival: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    finished: float | None = None
    output: Any = None
    error: str | None = None


async def run_load(
    llm: Any,
    load: Load,
    prompts: Sequence[Any],
    params: Sequence[Any],
    records: list[Record],
    on_end: Callable[[], None] = lambda: None,
) -> None:
    """Sends every prompt; `records` grows as requests arrive, so that an interrupt leaves what there is."""

    async def send(i: int, arrival: float) -> None:
        record = Record(arrival)
        records.append(record)
        await _answer(llm, prompts[i], params[i], record)
        on_end()

    await load.drive(len(prompts), send)


async def _answer(llm: Any, prompt: Any, params: Any, record: Record) -> None:
    loop = asyncio.get_running_loop()
    try:
        async with aclosing(llm.stream_async(prompt, params)) as stream:
            async for chunk in stream:
                now = loop.time()
                if chunk.token_ids:
                    record.chunks.append((now, len(chunk.token_ids)))
                record.output = chunk.finished or record.output
        assert record.output is not None, "the stream ended without a finished request"
    except Exception as error:  # whatever it is, the other requests go on
        record.error = f"{type(error).__name__}: {error}"
    record.finished = loop.time()
