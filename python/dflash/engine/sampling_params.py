# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

SMALLEST_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature overflow; 0 is greedy."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; vLLM's names and meanings.

    Args:
        temperature: 0 = greedy (the first maximum), else logits are divided by it.
        seed: noise is a function of (seed, position, token); None draws one from the engine's seed.
        max_tokens: most tokens to generate, >= 1; the model's length may end a request sooner.
        stop: strings that end the text; not part of it.
        stop_token_ids: further tokens that end it, as the model's end-of-sequence tokens do; token_ids hold
            the one that did, text does not.
        ignore_eos: keep going past end-of-sequence tokens.
    """

    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._check_integers()
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, got {self.temperature}"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")
        if any(not 0 <= token < 2**63 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be token ids, got {list(self.stop_token_ids)}")

    def _check_integers(self) -> None:
        values = {"max_tokens": [self.max_tokens], "stop_token_ids": self.stop_token_ids}
        values["seed"] = [] if self.seed is None else [self.seed]
        for name, numbers in values.items():
            wrong = next((n for n in numbers if not isinstance(n, Integral)), None)
            if wrong is not None:
                raise ValueError(f"{name}: expected integers, got {wrong!r}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
