# SPDX-License-Identifier: Apache-2.0
"""The demo pair in transformers, loaded once a session."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.checkpoints.demo import demo_draft, demo_target


@cache
def target_directory() -> Path:
    """Fetched and dequantised once, into dflash's own cache."""
    return demo_target()


@cache
def draft_directory() -> Path:
    return demo_draft()


@cache
def transformers_target():
    """The demo target in float32."""
    return AutoModelForCausalLM.from_pretrained(
        target_directory(), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(target_directory())


@torch.inference_mode()
def greedy(model, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own generate, without the prompt."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
