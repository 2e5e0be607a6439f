# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from functools import cache, cached_property

import pytest
import torch

from tests.support import authors, demo, engine, humaneval

NUM_PROMPTS = 20
MAX_TOKENS = 128


class Answers:
    """Greedy answers of the demo pair to HumanEval questions, each generated once a session."""

    @cached_property
    def prompts(self) -> list[list[int]]:
        tokenizer = demo.tokenizer()
        questions = humaneval.questions(NUM_PROMPTS)
        return [humaneval.chat_token_ids(tokenizer, question) for question in questions]

    @cached_property
    def their_draft(self):
        return authors.load_draft(demo.draft_directory())

    @cached_property
    def _llm(self):
        return engine.make_llm(demo.target_directory(), demo.draft_directory(), max_model_len=1024)

    @cache  # noqa: B019 (one object a session)
    def by_transformers(self, i: int) -> list[int]:
        return demo.greedy(demo.transformers_target(), self.prompts[i], MAX_TOKENS)

    @cache  # noqa: B019
    def by_authors(self, i: int) -> authors.Generation:
        target = demo.transformers_target()
        eos = [target.generation_config.eos_token_id]
        return authors.generate(self.their_draft, target, self.prompts[i], MAX_TOKENS, eos)

    @cache  # noqa: B019
    def with_drafter(self, i: int) -> authors.Generation:
        return engine.generate_blocks(self._llm, self.prompts[i], MAX_TOKENS)

    @cached_property
    def without_drafter(self) -> list[list[int]]:
        """In batches of 8, requests coming and going."""
        llm = engine.make_llm(demo.target_directory(), max_num_seqs=8, max_model_len=1024)
        outputs = llm.generate(self.prompts, engine.greedy_params(MAX_TOKENS))
        return [output.token_ids for output in outputs]


@pytest.fixture(scope="session")
def answers() -> Answers:
    return Answers()


@pytest.fixture(autouse=True)
def _one_thread():
    """135M parameters gain little from a second core, and lose much where it is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
