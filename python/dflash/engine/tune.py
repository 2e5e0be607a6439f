# SPDX-License-Identifier: Apache-2.0
"""What a CPU is best asked for: N by a short measurement."""

from __future__ import annotations

import logging
import time

import torch

from dflash.models.drafter import Drafter
from dflash.models.linear import linear
from dflash.models.target import Target

logger = logging.getLogger("dflash")

ASSUMED_ACCEPTANCE = 0.75
"""Chance that a draft token is accepted given the ones before it; trained drafters reach 0.7 to 0.85."""


def expected_acceptance_length(num_speculative_tokens: int) -> float:
    """1 + sum of ASSUMED_ACCEPTANCE^i, i = 1..N."""
    return sum(ASSUMED_ACCEPTANCE**i for i in range(num_speculative_tokens + 1))


@torch.inference_mode()
def best_num_speculative_tokens(target: Target, drafter: Drafter) -> int:
    """The N whose matrices give the most expected tokens a second on this machine.

    Times one layer of the target and the head at N + 1 rows; the rest of a step scales with them.
    """
    candidates = range(1, drafter.config.draft_block_size)
    rates = {
        n: expected_acceptance_length(n) / _step_seconds(target, drafter, n + 1) for n in candidates
    }
    best = max(candidates, key=lambda n: rates[n])
    logger.info("num_speculative_tokens %d measured best on this CPU", best)
    return best


def _step_seconds(target: Target, drafter: Drafter, rows: int) -> float:
    layer, config = target.decoder.layers[0], target.config.decoder
    x = torch.randn(rows, config.hidden_size).to(target.lm_head.dtype)
    inner = torch.randn(rows, config.intermediate_size).to(x.dtype)
    heads = torch.randn(rows, config.num_heads * config.head_dim).to(x.dtype)

    def one_layer() -> None:
        linear(x, layer.qkv_proj)
        linear(heads, layer.o_proj)
        linear(x, layer.gate_up_proj)
        linear(inner, layer.down_proj)

    per_layer = _fastest(one_layer, 5)
    head = _fastest(lambda: linear(x, target.lm_head), 3)
    layers = config.num_layers + drafter.config.decoder.num_layers
    return per_layer * layers + 2 * head


def _fastest(run, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best
