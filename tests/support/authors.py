# SPDX-License-Identifier: Apache-2.0
"""The authors' package, imported from its wheel as `dflash_authors`, and what it drafted, block by block."""

from __future__ import annotations

import importlib.util
import sys
import time
import warnings
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from tests.support.pypi import unpacked

REQUIREMENT = "dflash==0.1.0"


@cache
def package() -> ModuleType:
    """Its `model` module. Needs only torch and transformers; the host clock replaces CUDA's."""
    path = unpacked(REQUIREMENT) / "dflash" / "model.py"
    spec = importlib.util.spec_from_file_location("dflash_authors", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module._cuda_time = time.perf_counter
    return module


def load_draft(directory):
    """Their DFlashDraftModel in float32."""
    draft_class = package().DFlashDraftModel
    return draft_class.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@dataclass(frozen=True)
class Block:
    """One verified block: the bonus token, the drafts behind it, and how many tokens it committed."""

    bonus: int
    drafts: tuple[int, ...]
    committed: int


@dataclass(frozen=True)
class Generation:
    token_ids: list[int]
    blocks: list[Block]


def generate(draft, target, prompt: list[int], max_tokens: int, eos: list[int]) -> Generation:
    """Greedy generation with their loop; blocks are read off the target's inputs."""
    inputs = []
    handle = target.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].tolist()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they use names that transformers has deprecated since
            result = package().dflash_generate(
                draft, target, torch.tensor([prompt]), max_tokens, eos, return_stats=True
            )
    finally:
        handle.remove()
    verified = zip(inputs[1:], result.acceptance_lengths, strict=True)  # the first call is prefill
    blocks = [Block(ids[0], tuple(ids[1:]), committed) for ids, committed in verified]
    return Generation(result.output_ids[0, len(prompt) :].tolist(), blocks)


def acceptance_length(blocks: list[Block]) -> float:
    return sum(block.committed for block in blocks) / len(blocks)
