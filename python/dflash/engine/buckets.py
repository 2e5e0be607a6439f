# SPDX-License-Identifier: Apache-2.0
"""The sizes batches are padded to, each with CUDA graphs of its own; padding costs what live rows do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

BUCKET_STEP = 8
"""Iterations are padded to 1, 2, 4 or a multiple of this many requests."""

PROMPT_ROWS = (128, 256, 512)
"""Prompt tokens of a pass; with more, a GPU takes longer than a host does to launch the kernels."""

PROMPT_REQS = (1, 8)
"""Prompts of a pass."""


def request_buckets(max_reqs: int, multiple: int = 1) -> list[int]:
    """Numbers of requests that an iteration is padded to, ascending: 1, 2, 4, 8, 16, 24, ... up to max_reqs.

    With `multiple`, multiples of it, as small as that allows.
    """
    steps = range(BUCKET_STEP, max_reqs, BUCKET_STEP)
    wanted = {b for b in (1, 2, 4, *steps, max_reqs) if b <= max_reqs}
    return sorted({-(-b // multiple) * multiple for b in wanted})


def request_multiple(num_query_per_req: int, tile_rows: int | None) -> int:
    """Requests whose verified rows fill whole tiles."""
    return 1 if tile_rows is None else tile_rows // gcd(num_query_per_req, tile_rows)


@dataclass(frozen=True, order=True)
class PromptBucket:
    """What a pass over whole prompts, or over their ends, is padded to."""

    num_rows: int
    num_reqs: int

    def __str__(self) -> str:
        return f"{self.num_rows} prompt tokens of {self.num_reqs} requests"


def prompt_buckets(
    max_rows: int, max_reqs: int, tile_rows: int | None = None
) -> list[PromptBucket]:
    """Ascending, up to max_num_batched_tokens and max_num_seqs; with tile_rows whole tiles."""
    tile = tile_rows or 1
    rows = {-(-min(n, max_rows) // tile) * tile for n in PROMPT_ROWS}
    reqs = {min(n, max_reqs) for n in PROMPT_REQS}
    return sorted(PromptBucket(n, r) for n in rows for r in reqs)


def find_prompt_bucket(
    buckets: Sequence[PromptBucket], num_rows: int, num_reqs: int
) -> PromptBucket | None:
    """The first of ascending buckets that holds so much; None for more than any does."""
    fits = (b for b in buckets if num_rows <= b.num_rows and num_reqs <= b.num_reqs)
    return next(fits, None)
