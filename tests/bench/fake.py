# SPDX-License-Identifier: Apache-2.0
"""A stand-in for dflash.LLM that answers by the event loop's clock, and a clock that jumps."""

import asyncio
import selectors
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from dflash.engine.statistics import Statistics

PREFILL, STEP = 0.5, 0.25
"""Seconds to the first token, and of every step after it."""
BOOM = "boom"
"""A prompt that holds it fails after its first token."""


class FastLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer instead of passing; waiting for nothing is an error."""

    def __init__(self):
        self.now = 0.0
        super().__init__(_Jump(self))

    def time(self):
        return self.now


class _Jump(selectors.DefaultSelector):
    def __init__(self, loop):
        super().__init__()
        self.loop = loop

    def select(self, timeout=None):
        assert timeout is not None, "every task waits, and no timer is set"
        self.loop.now += max(timeout, 0.0)
        return super().select(0)


def run_fast(coroutine):
    loop = FastLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class Tokenizer:
    all_special_ids = [0, 1]
    added_tokens_decoder = {2: "<x>"}

    def __init__(self, chat_template="yes"):
        self.chat_template = chat_template

    def get_vocab(self):
        return {f"t{i}": i for i in range(10)}


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 4
    ignore_eos: bool = False


class FakeLLM:
    """One token a step without a drafter; with one, three: of 4 drafts the first 2 are accepted."""

    made = []

    def __init__(self, model="fake", draft=None, **arguments):
        self.draft = draft
        self.tokenizer = Tokenizer()
        self.facts = SimpleNamespace(
            dtype=torch.float32,
            device=torch.device("cpu"),
            num_speculative_tokens=4 if draft else 0,
        )
        self.running = self.most_running = 0
        self.asked = []
        self.aborted = 0
        self.made.append((self, model, draft, arguments))

    def without_draft(self):
        return FakeLLM("without_draft")

    def chat_prompt(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    async def stream_async(self, prompt, params):
        self.asked.append((prompt, params))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        finished = None
        try:
            async for tokens, finished in self._steps(prompt, params):
                yield SimpleNamespace(text="", token_ids=tokens, finished=finished)
        finally:
            self.running -= 1
            self.aborted += finished is None

    async def _steps(self, prompt, params):
        statistics = Statistics(num_requests=1, num_output_tokens=1)
        await asyncio.sleep(PREFILL)
        left, tokens = params.max_tokens - 1, [7]
        while left:
            yield tokens, None
            if BOOM in prompt:
                raise RuntimeError("the step failed")
            await asyncio.sleep(STEP)
            tokens = [7] * min(left, 3 if self.draft else 1)
            statistics.record_step(4 if self.draft else 0, len(tokens), STEP)
            left -= len(tokens)
        yield tokens, SimpleNamespace(prompt_token_ids=[1] * 5, statistics=statistics)
