# SPDX-License-Identifier: Apache-2.0
"""What the host remembers of a pass until it reads it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dflash.engine.request import PrefillChunk, Request
from dflash.engine.sampling import RawLogprobs


class PassTimer:
    """Seconds of a pass, begun where this is made. On a GPU the device's own: what the host does meanwhile, be it a
    slow reader of the stream, does not count.
    """

    def __init__(self, on_gpu: bool) -> None:
        self._events: list[torch.cuda.Event] = []
        if on_gpu:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()
        self._started = time.perf_counter()
        self._seconds = 0.0

    def stop(self) -> None:
        """Behind the pass's last work."""
        if self._events:
            self._events[1].record()
        self._seconds = time.perf_counter() - self._started

    def wait(self) -> float:
        """Until the pass has run; its seconds."""
        if not self._events:
            return self._seconds
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3


@dataclass(frozen=True)
class Flight:
    """A pass that is enqueued and whose tokens are not read yet."""

    requests: list[Request]  # those that may get tokens
    rows: list[int]  # their state rows when it was enqueued
    rows_per_req: int  # logits rows
    step: int  # entry of the output ring
    logprobs: RawLogprobs | None
    chunks: Sequence[PrefillChunk]  # of prompts; none: an iteration
    bucket: int
    timer: PassTimer

    def without_requests(self) -> Flight:
        """The same pass, of which only the end matters."""
        return replace(self, requests=[], rows=[], logprobs=None, chunks=())
