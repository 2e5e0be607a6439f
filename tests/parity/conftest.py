# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache, cached_property
from multiprocessing import get_context

import pytest

from tests.parity import reference
from tests.support import authors, demo, engine, humaneval

NUM_PROMPTS = 20
MAX_TOKENS = 128


class Answers:
    """Greedy answers of the demo pair to HumanEval questions, each generated once a session."""

    def __init__(self) -> None:
        tokenizer = demo.tokenizer()
        questions = humaneval.questions(NUM_PROMPTS)
        self.prompts = [humaneval.chat_token_ids(tokenizer, question) for question in questions]
        # Fetched here, where a failure to do so is reported.
        directories = demo.target_directory(), demo.draft_directory()
        authors.package()
        self._llm = engine.make_llm(*directories, max_model_len=1024)
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), reference.start)
        self._authors = self._submit(reference.by_authors)
        self._transformers = self._submit(reference.by_transformers)

    def _submit(self, function) -> list[Future]:
        return [self._pool.submit(function, prompt, MAX_TOKENS) for prompt in self.prompts]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def by_transformers(self, i: int) -> list[int]:
        return self._transformers[i].result()

    def by_authors(self, i: int) -> authors.Generation:
        return self._authors[i].result()

    @cache  # noqa: B019 (one object a session)
    def with_drafter(self, i: int) -> authors.Generation:
        return engine.generate_blocks(self._llm, self.prompts[i], MAX_TOKENS)

    @cached_property
    def without_drafter(self) -> list[list[int]]:
        """In batches of 8, requests coming and going."""
        llm = engine.make_llm(demo.target_directory(), max_num_seqs=8, max_model_len=1024)
        outputs = llm.generate(self.prompts, engine.greedy_params(MAX_TOKENS))
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="session")
def answers() -> Iterator[Answers]:
    answers = Answers()
    yield answers
    answers.close()


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """135M parameters gain little from a second core, and lose much where it is shared."""
