# SPDX-License-Identifier: Apache-2.0
"""One sequence on its way through the engine, and what a batch of them asks of the step; no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dflash.engine.kv_cache import ROOT_PREFIX
from dflash.engine.sampling_params import SamplingParams
from dflash.engine.statistics import Statistics


@dataclass(eq=False)
class Request:
    """A prompt and what was generated behind it.

    s = num_computed is the number of tokens whose K/V exist. A running request has one token more: the bonus.
    """

    request_id: int  # ascends with arrival
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # params.max_tokens within the model's length
    seed: int
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    statistics: Statistics = field(default_factory=Statistics)
    # The scheduler's:
    row: int = -1  # state row while admitted
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0  # leading blocks that are in the prefix cache
    prefix_id: int = ROOT_PREFIX  # of those blocks
    # The core's:
    num_in_flight: int = 0  # passes whose tokens are not read yet
    arrived_at: float = 0.0
    last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.output_token_ids)

    @property
    def is_resumed(self) -> bool:
        """Was preempted: its bonus token is known before its K/V are computed again."""
        return bool(self.output_token_ids)

    @property
    def prefill_len(self) -> int:
        """Tokens whose K/V a prefill computes: the prompt, or all but the bonus."""
        return self.num_tokens - 1 if self.is_resumed else len(self.prompt_token_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens start..end of prompt and output."""
        prompt = len(self.prompt_token_ids)
        if end <= prompt:
            return self.prompt_token_ids[start:end]
        if start >= prompt:
            return self.output_token_ids[start - prompt : end - prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - prompt]


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..start + length of a request."""

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == self.request.prefill_len

    @property
    def samples(self) -> bool:
        """Whether the chunk's last row gives the request a token."""
        return self.is_last and not self.request.is_resumed


@dataclass(frozen=True)
class Variant:
    """What the requests of a batch ask of the step."""

    processes_logits: bool = False  # else all take the first maximum of the model's own logits
    num_logprobs: int | None = None  # the most that any of them asks for
    drafts: bool = True  # False: a partial prompt chunk, which only observes
    is_plain: bool = False  # of processed logits: the temperature is all that changes them

    @classmethod
    def of(cls, requests: Sequence[Request], drafts: bool = True) -> Variant:
        params = [request.params for request in requests]
        counts = [p.logprobs for p in params if p.logprobs is not None]
        return cls(
            not all(p.takes_first_maximum for p in params),
            max(counts, default=None),
            drafts,
            all(p.is_plain for p in params),
        )
