# SPDX-License-Identifier: Apache-2.0
"""What a soak counts, and how it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from dflash.engine.scheduler import Scheduler


@dataclass
class Quarter:
    """What happened between two times at which nothing ran; memory at its end, in MiB."""

    seconds: float = 0.0
    requests: int = 0
    finished: int = 0
    left: int = 0  # closed or cancelled by the client
    refused: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    iterations: int = 0
    references: int = 0
    references_equal: int = 0
    reference_drafts: int = 0
    reference_drafts_alone: int = 0  # of the same prompts, one at a time
    reference_acceptance_length_alone: float = 0.0  # of all of them
    memory: dict[str, float] = field(default_factory=dict)

    @classmethod
    def sum_of(cls, quarters: Sequence[Quarter]) -> Quarter:
        """All but memory."""
        names = [name for name in asdict(cls()) if name != "memory"]
        return cls(**{name: sum(getattr(q, name) for q in quarters) for name in names})

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(self.drafts, 1)

    @property
    def reference_acceptance_length(self) -> float:
        """Whichever references the quarter had: as many drafts more as alone, as many tokens a draft fewer."""
        ratio = self.reference_drafts_alone / max(self.reference_drafts, 1)
        return self.reference_acceptance_length_alone * ratio

    @property
    def hits(self) -> float:
        """Share of the prompt tokens that the prefix cache had."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def figures(self) -> dict:
        """For json."""
        names = ("acceptance_length", "reference_acceptance_length")
        return asdict(self) | {name: getattr(self, name) for name in names}


def line(total: Quarter, scheduler: Scheduler, tokens_per_second: float, rss: float) -> str:
    """How it stands."""
    running = len(scheduler.running) + len(scheduler.prefilling)
    return (
        f"finished {total.finished}, running {running}, waiting {len(scheduler.waiting)}, "
        f"preemptions {scheduler.num_preemptions}, prefix hits {total.hits:.0%}, "
        f"{tokens_per_second:.0f} tok/s, AL {total.acceptance_length:.2f}, RSS {rss:.0f} MiB"
    )


def table(quarters: Sequence[Quarter]) -> Iterator[str]:
    """A row a quarter."""
    yield (
        "quarter  finished  left  refused  preemptions  prefix hits  tok/s    AL  "
        "references: AL      equal  MiB"
    )
    for number, q in enumerate(quarters, 1):
        memory = ", ".join(f"{name} {value:.1f}" for name, value in q.memory.items())
        equal = f"{q.references_equal}/{q.references}"
        yield (
            f"{number:7} {q.finished:9} {q.left:5} {q.refused:8} {q.preemptions:12} {q.hits:12.0%} "
            f"{q.tokens / max(q.seconds, 1e-9):6.0f} {q.acceptance_length:5.2f} "
            f"{q.reference_acceptance_length:15.4f} {equal:>10}  {memory}"
        )
