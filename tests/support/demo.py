# SPDX-License-Identifier: Apache-2.0
"""The demo pair in transformers, loaded once a session."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash.checkpoints.demo import demo_target


@cache
def transformers_target():
    """The demo target in float32."""
    return AutoModelForCausalLM.from_pretrained(
        demo_target(), dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_target())


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
