# SPDX-License-Identifier: Apache-2.0
"""What is asked: HumanEval, random tokens, or the lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dflash.bench.humaneval import questions

HUMANEVAL = "humaneval"
RANDOM = "random"

Prompt = str | list[int]
Question = Callable[[Any, bool], Prompt]
"""(llm, whether to apply its chat template) to what the LLM is given."""


def read_dataset(
    name: str, num_prompts: int, *, random_input_len: int, seed: int
) -> list[Question]:
    """num_prompts questions; a dataset that has fewer is asked again from its beginning.

    Raises:
        ValueError: no such dataset, or a line of the file that is no question.
        DflashError: HumanEval cannot be fetched.
    """
    if name == RANDOM:
        rng = random.Random(seed)
        return [_Random(random_input_len, rng.getrandbits(64)) for _ in range(num_prompts)]
    found = [_Text(text) for text in questions()] if name == HUMANEVAL else _read_lines(Path(name))
    return list(islice(cycle(found), num_prompts))


class _Text:
    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, llm: Any, use_template: bool) -> Prompt:
        if not (use_template and llm.tokenizer.chat_template):
            return self.text
        return llm.chat_prompt([{"role": "user", "content": self.text}])


class _Messages:
    def __init__(self, messages: list[dict[str, str]]) -> None:
        self.messages = messages

    def __call__(self, llm: Any, use_template: bool) -> Prompt:
        if not use_template:
            raise ValueError("--skip-chat-template: the dataset holds messages, not prompts")
        return llm.chat_prompt(self.messages)


class _Random:
    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __call__(self, llm: Any, use_template: bool) -> Prompt:
        return random.Random(self.seed).choices(_ordinary_tokens(llm.tokenizer), k=self.length)


@lru_cache(maxsize=1)  # a vocabulary is long, and every prompt asks
def _ordinary_tokens(tokenizer: Any) -> Sequence[int]:
    """Every token but the special and added ones, which models treat otherwise than text."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return sorted(set(tokenizer.get_vocab().values()) - special)


def _read_lines(path: Path) -> list[Question]:
    if not path.is_file():
        raise ValueError(
            f"--dataset {path}: no such file (expected {HUMANEVAL}, {RANDOM} or a jsonl file)"
        )
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a JSON string may hold U+2028
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    found = [_read_line(f"{path}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no line")
    return found


def _read_line(where: str, line: str) -> Question:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    fields = entry if isinstance(entry, dict) else {}
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(prompt, str) and prompt.strip() and messages is None:
        return _Text(prompt)
    if (
        prompt is None
        and isinstance(messages, list)
        and messages
        and all(map(_is_message, messages))
    ):
        return _Messages(messages)
    raise ValueError(
        f'{where}: expected {{"prompt": "text"}} or {{"messages": [{{"role", "content"}}, ...]}}'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
