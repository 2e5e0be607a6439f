# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

SMALLEST_TEMPERATURE = 1e-5
"""Below it logits divided by the temperature overflow; 0 is greedy."""

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024

REFUSED = {
    "prompt_logprobs": "only generated tokens have logprobs",
    "structured_outputs": "there is no grammar engine",
    "guided_decoding": "there is no grammar engine",
    "use_beam_search": "a drafter has no beams",
    "best_of": "use n and choose among them",
    "logits_processors": "they would run on the host; use logit_bias or the penalties",
    "bad_words": "use logit_bias",
    "allowed_token_ids": "use logit_bias",
}
"""vLLM's parameters that are not served, and what to do instead."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; vLLM's names, defaults and meanings.

    Logits are processed in this order: logit_bias, min_tokens, repetition_penalty, frequency_penalty, presence_penalty,
    temperature, min_p, top_k, top_p. A drafted block is judged as if its tokens came one by one. None is no stop,
    stop_token_ids or logit_bias.

    Args:
        n: sequences to sample for the prompt; sequence i has seed + i.
        temperature: 0 = greedy (the first maximum), else logits are divided by it.
        top_p: mass of the most likely tokens to keep, in (0, 1].
        top_k: most likely tokens to keep; 0 or -1 keeps all.
        min_p: tokens less likely than min_p times the most likely are dropped, in [0, 1].
        repetition_penalty: > 1 makes tokens of the prompt and the output less likely (factor).
        frequency_penalty: subtracted for every time a token was generated, in [-2, 2].
        presence_penalty: subtracted once from every generated token, in [-2, 2].
        logit_bias: token id to what is added to its logit, at most 1024 entries.
        seed: noise is a function of (seed, position, token); None draws one from the engine's seed.
        max_tokens: most tokens to generate, >= 1; the model's length may end a request sooner.
        min_tokens: no stop token or stop string counts before so many.
        stop: strings that end the text; not part of it unless include_stop_str_in_output.
        stop_token_ids: further tokens that end it, as the model's end-of-sequence tokens do; token_ids hold
            the one that did, text does not.
        ignore_eos: keep going past end-of-sequence tokens.
        logprobs: give log-probabilities of the sampled token and of this many most likely ones (0..20), of the
            model's own distribution: before any of the processing above.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value out of range, or a parameter of vLLM's that is not served (REFUSED).
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: None = None
    structured_outputs: None = None
    guided_decoding: None = None
    use_beam_search: None = None
    best_of: None = None
    logits_processors: None = None
    bad_words: None = None
    allowed_token_ids: None = None

    def __post_init__(self) -> None:
        self._refuse()
        self._copy()
        self._check_numbers()
        self._check_ranges()
        self._check_ids()
        if any(not isinstance(s, str) or not s for s in self.stop_strings):
            raise ValueError(f"stop must be non-empty strings, got {self.stop!r}")

    def _refuse(self) -> None:
        for name, reason in REFUSED.items():
            value = getattr(self, name)
            if value or type(value) is int:  # prompt_logprobs=0 asks for some too
                raise ValueError(f"{name} is not supported: {reason}")

    def _copy(self) -> None:
        """None is none of them, as in vLLM; what can change, or be read only once, becomes ours."""
        kinds = {"stop_token_ids": tuple, "logit_bias": dict}
        if not isinstance(self.stop, str):
            kinds["stop"] = tuple
        for name, kind in kinds.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(() if value is None else value))
            except (TypeError, ValueError):
                what = "a mapping" if kind is dict else "a sequence"
                raise ValueError(f"{name}: expected {what}, got {value!r}") from None

    def _check_numbers(self) -> None:
        integers = {
            name: getattr(self, name) for name in ("n", "top_k", "max_tokens", "min_tokens")
        }
        integers |= {
            name: value
            for name in ("seed", "logprobs")
            if (value := getattr(self, name)) is not None
        }
        for name, value in integers.items():
            if not isinstance(value, Integral):
                raise ValueError(f"{name}: expected integers, got {value!r}")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            value = getattr(self, name)
            if not isinstance(value, Real) or value != value:
                raise ValueError(f"{name}: expected a number, got {value!r}")

    def _check_ranges(self) -> None:
        infinity = float("inf")
        if self.temperature != 0 and not SMALLEST_TEMPERATURE <= self.temperature < infinity:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {SMALLEST_TEMPERATURE}, got {self.temperature}"
            )
        if self.n < 1:
            raise ValueError(f"n must be >= 1, got {self.n}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must be in 0..max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not -1 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be >= 1, or 0 or -1 to keep all, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not 0 < self.repetition_penalty < infinity:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must fit in 64 bits, got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must be in 0..{MAX_LOGPROBS}, got {self.logprobs}")

    def _check_ids(self) -> None:
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias),
        ):
            odd = next((i for i in ids if not isinstance(i, Integral)), None)
            if odd is not None:
                raise ValueError(f"{name}: expected integers, got {odd!r}")
            if any(not 0 <= i < 2**63 for i in ids):
                raise ValueError(f"{name} must be token ids, got {list(ids)}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} entries: at most {MAX_LOGIT_BIAS}"
            )
        if any(not isinstance(v, Real) or v != v for v in self.logit_bias.values()):
            raise ValueError(f"logit_bias: expected numbers, got {dict(self.logit_bias)}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalises(self) -> bool:
        """Whether what was generated before changes the logits."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def is_plain(self) -> bool:
        """Whether the temperature is all that changes the logits."""
        is_cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return (
            not (self.temperature > 0 and is_cut)
            and not self.penalises
            and not self.logit_bias
            and self.min_tokens == 0
        )

    @property
    def takes_first_maximum(self) -> bool:
        """Greedy over the model's own logits: nothing processes them."""
        return self.temperature == 0 and self.is_plain
