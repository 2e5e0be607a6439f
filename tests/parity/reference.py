# SPDX-License-Identifier: Apache-2.0
"""What transformers and the authors' package answer, computed in a process of its own: a second core's work."""

from __future__ import annotations

import logging
from functools import cache

import torch

from tests.support import authors, demo


def start() -> None:
    """Run once in the process."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the authors' package uses names that are deprecated by now


@cache
def _their_draft():
    return authors.load_draft(demo.draft_directory())


def by_transformers(prompt: list[int], max_tokens: int) -> list[int]:
    return demo.greedy(demo.transformers_target(), prompt, max_tokens)


def by_authors(prompt: list[int], max_tokens: int) -> authors.Generation:
    target = demo.transformers_target()
    eos = [target.generation_config.eos_token_id]
    return authors.generate(_their_draft(), target, prompt, max_tokens, eos)
