# SPDX-License-Identifier: Apache-2.0
"""What a drafter gains: one request with and without it, interleaved, each at its best threads."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

NUM_RUNS = 5
NUM_TRIAL_RUNS = 2
NUM_TRIAL_TOKENS = 24


@dataclass
class Side:
    """One LLM of the comparison and what was measured of it."""

    llm: Any
    threads: int
    speeds: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.speeds)

    def run(self, prompt: str, params: Any) -> Any:
        torch.set_num_threads(self.threads)
        return self.llm.generate([prompt], params)[0]


@dataclass(frozen=True)
class Comparison:
    """Medians of interleaved runs, and where the token sequences part (None: nowhere)."""

    plain: Side
    draft: Side
    num_runs: int
    num_tokens: int
    acceptance_length: float
    first_difference: int | None

    @property
    def speedup(self) -> float:
        return self.draft.tokens_per_second / self.plain.tokens_per_second


def compare(
    plain_llm: Any, draft_llm: Any, prompt: str, params: Any, *, threads: int | None
) -> Comparison:
    """Run both sides NUM_RUNS times, in turn; threads=None measures the best count of each side."""
    with Console(stderr=True).status("comparing") as status:
        sides = []
        for name, llm in (("without", plain_llm), ("with", draft_llm)):
            status.update(f"choosing the thread count {name} drafter")
            count = threads or _best_thread_count(llm, prompt, params)
            sides.append(Side(llm, count))
        plain, draft = sides
        outputs = {}
        for i in range(NUM_RUNS):
            status.update(f"comparing with and without drafter: {i + 1} of {NUM_RUNS}")
            for name, side in (("plain", plain), ("draft", draft)):
                outputs[name] = side.run(prompt, params)
                side.speeds.append(outputs[name].statistics.tokens_per_second)
    return Comparison(
        plain=plain,
        draft=draft,
        num_runs=NUM_RUNS,
        num_tokens=len(outputs["draft"].outputs[0].token_ids),
        acceptance_length=outputs["draft"].statistics.acceptance_length,
        first_difference=first_difference(
            outputs["plain"].outputs[0].token_ids, outputs["draft"].outputs[0].token_ids
        ),
    )


def first_difference(a: list[int], b: list[int]) -> int | None:
    """Index of the first token that differs, or of the end of the shorter one; None when equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _best_thread_count(llm: Any, prompt: str, params: Any) -> int:
    """The count at which a short generation is fastest; a GPU's host thread needs no choice."""
    if str(llm.facts.device) != "cpu":
        return torch.get_num_threads()
    trial = replace(params, max_tokens=min(params.max_tokens, NUM_TRIAL_TOKENS))
    speeds = {}
    for count in _candidates(len(os.sched_getaffinity(0))):
        side = Side(llm, count)
        runs = [side.run(prompt, trial).statistics for _ in range(NUM_TRIAL_RUNS)]
        speeds[count] = max(run.tokens_per_second for run in runs)
    return max(speeds, key=speeds.__getitem__)


def _candidates(num_cores: int) -> list[int]:
    """1, 2, 4, ... and the number of cores."""
    powers = [1 << i for i in range(num_cores.bit_length()) if 1 << i < num_cores]
    return [*powers, num_cores]
