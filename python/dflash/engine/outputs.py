# SPDX-License-Identifier: Apache-2.0
"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflash.engine.statistics import Statistics


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the model's own distribution; rank 1 is the most likely."""

    logprob: float
    rank: int


@dataclass(frozen=True)
class CompletionOutput:
    """One finished sequence. token_ids hold the stop token; text holds neither it nor the stop string.

    finish_reason is stop, length, abort or error; stop_reason is the stop string or token id that ended it, None
    for the model's end of sequence. logprobs: per token, the sampled token and the most likely ones.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: Exception | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens, where logprobs were asked for."""
        if self.logprobs is None:
            return None
        return sum(p[t].logprob for t, p in zip(self.token_ids, self.logprobs, strict=True))


@dataclass(frozen=True)
class Usage:
    """Tokens of a prompt and all its sequences, under OpenAI's names."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class RequestOutput:
    """A finished prompt: n sequences in the order of their index, and what they cost.

    num_cached_tokens are those of the prompt that its first sequence found in the prefix cache; statistics count
    the prompt once a sequence.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    statistics: Statistics = field(default_factory=Statistics)
    num_cached_tokens: int = 0

    @property
    def usage(self) -> Usage:
        tokens = sum(len(output.token_ids) for output in self.outputs)
        return Usage(len(self.prompt_token_ids), tokens, self.num_cached_tokens)


@dataclass(frozen=True)
class StreamChunk:
    """What one iteration added to sequence `index`; `finished` comes with the last chunk of the last sequence."""

    text: str
    token_ids: list[int]
    index: int = 0
    logprobs: list[dict[int, Logprob]] | None = None
    finished: RequestOutput | None = None
