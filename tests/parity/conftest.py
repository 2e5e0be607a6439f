# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.support import demo, humaneval

NUM_PROMPTS = 20
MAX_TOKENS = 128


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of the first HumanEval questions."""
    tokenizer = demo.tokenizer()
    return [
        humaneval.chat_token_ids(tokenizer, question)
        for question in humaneval.questions(NUM_PROMPTS)
    ]


@pytest.fixture(scope="session")
def transformers_answers(prompts) -> list[list[int]]:
    """What transformers' generate says to them: the reference of every other answer."""
    target = demo.transformers_target()
    return [demo.greedy(target, prompt, MAX_TOKENS) for prompt in prompts]
