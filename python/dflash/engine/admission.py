# SPDX-License-Identifier: Apache-2.0
"""What a request may be: checked once, at the door, so that nothing behind it can run past a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from dflash.engine.request import Request
from dflash.engine.sampling import MAX_STOP_TOKEN_IDS
from dflash.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Limits:
    """Limits of an engine.

    Args:
        max_model_len: prompt and output tokens of a request: RoPE tables and block tables reach so far.
        vocab_size: ids there are.
        eos_token_ids: tokens that end a request unless it ignores them.
        seed: seeds of requests that bring none are derived from it and the request's number.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    seed: int = 0

    def admit(
        self,
        number: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        seed: int | None = None,
    ) -> Request:
        """The request; `seed` stands in for params.seed.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary, a prompt with no room for an
                output token, or more stop tokens than the device table holds.
        """
        prompt = list(prompt_token_ids)
        self.check_prompt(prompt)
        self.check_ids(params)
        max_tokens = min(params.max_tokens, self.max_model_len - len(prompt))
        seed = params.seed if seed is None else seed
        seed = _derived(self.seed, number) if seed is None else seed
        request = Request(number, prompt, params, max_tokens, seed)
        request.statistics.num_requests = 1
        request.statistics.num_prompt_tokens = len(prompt)
        return request

    def check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise ValueError("the prompt has no tokens: expected at least one")
        if len(prompt) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for an answer: shorten it or raise max_model_len"
            )
        odd = next((t for t in prompt if not isinstance(t, Integral)), None)
        if odd is not None:
            raise ValueError(f"the prompt holds {odd!r}: expected text or token ids")
        outside = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"prompt token {outside} is outside the vocabulary of {self.vocab_size}"
            )

    def check_ids(self, params: SamplingParams) -> None:
        stops = self.stop_token_ids(params)
        if len(stops) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"{len(stops)} stop tokens (end-of-sequence ones included): at most {MAX_STOP_TOKEN_IDS}"
            )
        outside = next((t for t in params.logit_bias if t >= self.vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"logit_bias token {outside} is outside the vocabulary of {self.vocab_size}"
            )

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that end a request: its own and, unless ignored, the model's."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys([*params.stop_token_ids, *eos]))


def _derived(seed: int, number: int) -> int:
    """64 signed bits; an odd multiplier spreads request numbers over them."""
    value = (seed + 1 + number) * 0x9E3779B97F4A7C15 % 2**64
    return value - 2**64 if value >= 2**63 else value
