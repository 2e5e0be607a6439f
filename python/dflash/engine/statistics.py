# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Statistics:
    """What a request, or all of them, cost and how many drafts were accepted.

    A draft is one block proposed and verified; of the tokens it committed all but one count as accepted,
    so that AL is tokens a step, also where a stop or the length cut the block. num_cached_tokens are prompt tokens
    found in the prefix cache; num_preemptions counts how often a request gave its blocks back and was computed
    again. Times are wall seconds, summed over requests: queue_seconds and first_token_seconds from arrival,
    decode_seconds over every iteration that a request took part in.
    """

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_first_tokens: int = 0  # those that prefill gave
    num_preemptions: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record_step(self, num_draft: int, num_sampled: int, seconds: float) -> None:
        """One verify pass that proposed num_draft tokens and committed num_sampled."""
        self.num_steps += 1
        self.num_output_tokens += num_sampled
        self.decode_seconds += seconds
        if num_draft == 0 or num_sampled == 0:
            return
        accepted = num_sampled - 1
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += accepted
        missing = num_draft - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for i in range(accepted):
            self.num_accepted_tokens_per_pos[i] += 1

    def take_back(self, num_tokens: int, num_sampled: int) -> None:
        """Forgets the last tokens of a step that committed num_sampled: they came behind a stop string."""
        self.num_output_tokens -= num_tokens
        for i in range(max(0, num_sampled - 1 - num_tokens), num_sampled - 1):
            self.num_accepted_tokens -= 1
            self.num_accepted_tokens_per_pos[i] -= 1

    def add(self, other: Statistics) -> None:
        """Accumulates another request; its times too, although requests overlap."""
        for name, value in vars(other).items():
            if not isinstance(value, list):
                setattr(self, name, getattr(self, name) + value)
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        mine += [0] * (len(theirs) - len(mine))
        for i, count in enumerate(theirs):
            mine[i] += count

    @property
    def acceptance_length(self) -> float:
        """AL: tokens committed a draft, the bonus included; 1.0 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts whose token at each position was accepted (with all before it)."""
        return [n / self.num_drafts for n in self.num_accepted_tokens_per_pos]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of a request's decoding (its first token belongs to prefill)."""
        decoded = self.num_output_tokens - self.num_first_tokens
        return decoded / self.decode_seconds if self.decode_seconds else 0.0
