# SPDX-License-Identifier: Apache-2.0
"""What the host remembers of a pass until it reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dflash.engine.request import PrefillChunk, Request
from dflash.engine.sampling import RawLogprobs


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
    started: float
    done: torch.cuda.Event | None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def without_requests(self) -> Flight:
        """The same pass, of which only the end matters."""
        return replace(self, requests=[], rows=[], logprobs=None, chunks=())
