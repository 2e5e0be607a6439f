# SPDX-License-Identifier: Apache-2.0
"""A stand-in for dflash.LLM with the engine's contract: the command is tested without weights."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

TEXT = ["The", " sky", " is", " blue", ".\n"]


@dataclass(frozen=True)
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16


@dataclass
class Statistics:
    num_output_tokens: int
    acceptance_length: float
    tokens_per_second: float


@dataclass
class CompletionOutput:
    token_ids: list
    text: str


@dataclass
class RequestOutput:
    outputs: list
    statistics: Statistics


@dataclass
class StreamChunk:
    text: str
    token_ids: list
    finished: RequestOutput | None


class FakeLLM:
    """Answers TEXT at 20 tokens a second without a drafter, 50 with one."""

    made = []
    prompts = []
    tokens_with_draft = [1, 2, 3, 4, 5]

    def __init__(self, model, draft=None, **arguments):
        self.draft = draft
        self.facts = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
        self.made.append((model, draft, arguments))

    def without_draft(self):
        return FakeLLM("without_draft")

    def chat_prompt(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    def generate(self, prompts, params=None):
        self.prompts.extend(prompts)
        tokens = self.tokens_with_draft if self.draft else [1, 2, 3, 4, 5]
        speed, length = (50.0, 3.5) if self.draft else (20.0, 1.0)
        output = CompletionOutput(tokens, "".join(TEXT))
        return [RequestOutput([output], Statistics(5, length, speed)) for _ in prompts]

    def stream(self, prompt, params=None):
        for text in TEXT:
            yield StreamChunk(text, [0], None)
        yield StreamChunk("", [], self.generate([prompt], params)[0])
