# SPDX-License-Identifier: Apache-2.0
"""What a drafter's K/V and proposals depend on, and what they must not."""

from __future__ import annotations

import pytest
import torch

from tests.support import tiny
from tests.support.runner import PairRunner

TOKEN_IDS = [(5 * i + i // 3) % 32 for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("target"))


def hidden_after(runner: PairRunner, token_ids, num_drafts=3) -> torch.Tensor:
    _, taps = runner.verify(token_ids)
    runner.observe(taps)
    return runner.draft(5, len(token_ids), num_drafts)


def test_shape_of_its_own(target, tmp_path):
    """More and other heads than the target, another head_dim: caches of different shape."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
    runner = PairRunner(target, tiny.make_draft(tmp_path, **shape))
    theirs, ours = runner.target.decoder.caches[0].key, runner.drafter.decoder.caches[0].key
    assert (theirs.shape[2:], ours.shape[2:]) == ((1, 64), (2, 128))
    assert hidden_after(runner, TOKEN_IDS).isfinite().all()


@pytest.mark.parametrize("kv_block_size", [1, 3, 16])
def test_page_size_changes_nothing(kv_block_size, target, tmp_path):
    draft = tiny.make_draft(tmp_path)
    expected = hidden_after(PairRunner(target, draft, kv_block_size=64), TOKEN_IDS)
    actual = hidden_after(PairRunner(target, draft, kv_block_size=kv_block_size), TOKEN_IDS)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_rejected_rows_store_nothing(target, tmp_path):
    runner = PairRunner(target, tiny.make_draft(tmp_path))
    _, taps = runner.verify(TOKEN_IDS)
    features = runner.drafter.combine(taps)
    positions = torch.arange(len(TOKEN_IDS))
    slots = (positions + runner.kv_block_size).masked_fill(positions >= 30, -1)
    runner.drafter.store_context(features, positions.masked_fill(positions >= 30, 0), slots)
    for cache in runner.drafter.decoder.caches:
        for stored in (cache.key.flatten(0, 1), cache.value.flatten(0, 1)):
            written = stored.abs().sum((1, 2)) > 0
            expected = torch.zeros_like(written)
            expected[runner.kv_block_size : runner.kv_block_size + 30] = True
            assert torch.equal(written, expected)
