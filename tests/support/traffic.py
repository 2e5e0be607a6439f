# SPDX-License-Identifier: Apache-2.0
"""Random requests as a server sees them: lengths, parameters, closed streams, bad prompts; the same for one seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflash import LLM, SamplingParams

MAX_PROMPT_TOKENS = 600
MAX_TOKENS = 96
REFERENCE_TOKENS = 40
NUM_REFERENCES = 8
REFERENCE_EVERY, BAD_EVERY = 6, 24
CLOSED, CANCELLED = 0.10, 0.05
"""Shares of the others."""


@dataclass(frozen=True)
class Ask:
    """A request, and what its client does with it.

    Args:
        prompt, params: of the LLM.
        reference: the number of the reference prompt that it is.
        close_after: chunks after which the stream is closed.
        cancel_after: seconds after which the task that reads the stream is cancelled.
        refused: the engine must refuse it.
    """

    prompt: Any
    params: SamplingParams
    reference: int | None = None
    close_after: int | None = None
    cancel_after: float | None = None
    refused: bool = False


class Traffic:
    """An endless source of requests.

    Args:
        llm: what they are for: its tokenizer, vocabulary and limits.
        texts: questions; words of them become stop strings.
        seed: of everything that is random.
    """

    def __init__(self, llm: LLM, texts: Sequence[str], seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = llm.core.limits.vocab_size
        self._max_model_len = llm.core.limits.max_model_len
        self._texts = self._short_texts(llm, texts)
        self._words = sorted({word for text in self._texts for word in text.split()})
        self._text_ids = sorted({i for t in self._texts[:8] for i in llm.tokenizer.encode(t)})
        self._beginnings = [self._ids(self._rng.randint(20, 300)) for _ in range(6)]
        self._num_asked = 0
        params = SamplingParams(temperature=0.0, max_tokens=REFERENCE_TOKENS, ignore_eos=True)
        half = NUM_REFERENCES // 2
        prompts = [*self._texts[:half], *(self._any_prompt() for _ in range(half))]
        self.references = [Ask(p, params, reference=i) for i, p in enumerate(prompts)]

    def next(self) -> Ask:
        self._num_asked += 1
        if self._num_asked % REFERENCE_EVERY == 0:
            return self.references[self._num_asked // REFERENCE_EVERY % NUM_REFERENCES]
        if self._num_asked % BAD_EVERY == 1:
            return self._bad()
        kind = self._rng.random()
        prompt, params = self._any_prompt(), self._params()
        if kind < CLOSED:
            return Ask(prompt, params, close_after=self._rng.randint(0, 8))
        if kind < CLOSED + CANCELLED:
            return Ask(prompt, params, cancel_after=self._rng.expovariate(1.0))
        return Ask(prompt, params)

    def _short_texts(self, llm: LLM, texts: Sequence[str]) -> list[str]:
        """Every other one as a conversation, where the model has a template."""
        chat = bool(llm.tokenizer.chat_template)
        asked = [
            llm.chat_prompt([{"role": "user", "content": text}]) if chat and i % 2 else text
            for i, text in enumerate(texts)
        ]
        return [t for t in asked if len(llm.tokenizer.encode(t)) <= MAX_PROMPT_TOKENS]

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def _any_prompt(self) -> str | list[int]:
        """Text, random ids, or random ids behind a beginning that others share; short ones are as common as long."""
        kind, length = self._rng.random(), int(MAX_PROMPT_TOKENS ** self._rng.random())
        if kind < 0.4:
            return self._rng.choice(self._texts)
        if kind < 0.7:
            return self._ids(length)
        return [*self._rng.choice(self._beginnings), *self._ids(min(length, 300))]

    def _maybe(self, share: float, value: Callable[[], Any], otherwise: Any) -> Any:
        return value() if self._rng.random() < share else otherwise

    def _params(self) -> SamplingParams:
        rng, maybe = self._rng, self._maybe
        max_tokens = min(MAX_TOKENS, 1 + int(rng.expovariate(1 / 24)))
        return SamplingParams(
            n=maybe(0.15, lambda: rng.randint(2, 3), 1),
            temperature=maybe(0.6, lambda: rng.uniform(0.2, 1.6), 0.0),
            top_p=maybe(0.3, lambda: rng.uniform(0.3, 1.0), 1.0),
            top_k=maybe(0.3, lambda: rng.choice((1, 2, 20, 50)), 0),
            min_p=maybe(0.2, lambda: rng.uniform(0.0, 0.2), 0.0),
            repetition_penalty=maybe(0.2, lambda: rng.uniform(0.9, 1.4), 1.0),
            frequency_penalty=maybe(0.2, lambda: rng.uniform(-1.0, 2.0), 0.0),
            presence_penalty=maybe(0.2, lambda: rng.uniform(-1.0, 2.0), 0.0),
            logit_bias=maybe(0.15, self._logit_bias, {}),
            seed=maybe(0.5, lambda: rng.randrange(-(2**63), 2**63), None),
            max_tokens=max_tokens,
            min_tokens=maybe(0.2, lambda: rng.randint(0, max_tokens), 0),
            stop=maybe(0.2, lambda: rng.sample(self._words, rng.randint(1, 3)), ()),
            stop_token_ids=maybe(0.2, lambda: rng.sample(self._text_ids, rng.randint(1, 5)), ()),
            ignore_eos=rng.random() < 0.3,
            include_stop_str_in_output=rng.random() < 0.3,
            logprobs=maybe(0.2, lambda: rng.choice((0, 1, 5, 20)), None),
            skip_special_tokens=rng.random() < 0.7,
        )

    def _logit_bias(self) -> dict[int, float]:
        values = (-100.0, -2.0, 0.5, 4.0)
        return {i: self._rng.choice(values) for i in self._ids(self._rng.randint(1, 20))}

    def _bad(self) -> Ask:
        good, params = self._ids(5), SamplingParams()
        outside = SamplingParams(logit_bias={self._vocab_size: 1.0})
        stops = SamplingParams(stop_token_ids=list(range(17)))
        prompts = ([], [self._vocab_size], [-1], [0.5], None, good * self._max_model_len)
        asks = [(prompt, params) for prompt in prompts] + [(good, outside), (good, stops)]
        return Ask(*self._rng.choice(asks), refused=True)
