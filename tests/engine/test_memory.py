# SPDX-License-Identifier: Apache-2.0
"""The memory profile counts every tensor once, under its own name."""

from __future__ import annotations

import torch

from dflash.engine.memory import profile_memory, tensor_bytes
from tests.support.engine import make_llm


def test_what_backends_keep_is_workspace_and_what_is_shared_counts_once(target, draft):
    llm = make_llm(target, draft, max_model_len=64)
    step = llm.core._step
    models = (step.target, step.speculator.drafter)
    for model in models:
        model.decoder.caches.clear()  # they are made after the profile

    def profile(*buffers):
        device = torch.device("cpu")
        return profile_memory(llm.args, device, step.target, step.speculator, list(buffers), 64, 4)

    before = profile()
    for model in models:
        for backend in model.decoder.backends.values():
            backend._workspace = torch.zeros(1000, dtype=torch.uint8)
    num_backends = sum(len(model.decoder.backends) for model in models)
    after = profile(step.taps, step.taps.buffer[:2], step.target.lm_head)
    assert (before.workspaces, after.workspaces) == (0, 1000 * num_backends)
    assert before.weights == after.weights > tensor_bytes(step.target.lm_head)
    assert (before.buffers, after.buffers) == (0, tensor_bytes(step.taps.buffer))
    used = after.workspaces + after.buffers
    assert before.available - after.available == used
