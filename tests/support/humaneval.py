# SPDX-License-Identifier: Apache-2.0
"""HumanEval's questions and their token ids."""

from __future__ import annotations

from functools import cache

from dflash.bench import humaneval


@cache
def questions(count: int) -> tuple[str, ...]:
    """The first `count` problems as user messages."""
    return tuple(humaneval.questions()[:count])


def chat_token_ids(tokenizer, question: str) -> list[int]:
    """Token ids of a one-turn conversation, ready for the answer."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
