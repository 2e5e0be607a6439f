# SPDX-License-Identifier: Apache-2.0
"""What a drafter's K/V and proposals depend on, and what they must not."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import engine, tiny
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


def interleave(folder) -> None:
    """Reorders q and k rows so that interleaved RoPE computes what rotating halves did."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if re.search(r"[qk]_(proj|norm)\.", name):
            heads = tensor.view(-1, 2, 32, *tensor.shape[1:])  # head_dim 64: two halves
            tensors[name] = heads.transpose(1, 2).reshape(tensor.shape).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    tiny.edit_config(folder, is_neox_style=False)


def test_interleaved_rope(target, tmp_path):
    draft = tiny.make_draft(tmp_path, attention_bias=True)
    expected = hidden_after(PairRunner(target, draft), TOKEN_IDS)
    interleave(draft)
    runner = PairRunner(target, draft)
    assert not runner.drafter.config.decoder.rope.is_neox
    torch.testing.assert_close(hidden_after(runner, TOKEN_IDS), expected, rtol=1e-5, atol=1e-5)


def test_own_head_and_embedding_are_used(target, tmp_path):
    """A head over a reduced vocabulary, its own embedding, its own mask embedding."""
    draft = tiny.make_draft(tmp_path)
    path = draft / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    own = {
        "embed_tokens.weight": torch.randn(32, 64, generator=generator),
        "lm_head.weight": torch.randn(10, 64, generator=generator),
        "d2t": torch.arange(10) * 2,  # token k of the drafter is token 3 k
    }
    save_file(load_file(path) | own, path, metadata={"format": "pt"})
    tiny.edit_config(draft, draft_vocab_size=10)
    runner = PairRunner(target, draft)
    assert torch.equal(runner.drafter.lm_head, own["lm_head.weight"])
    assert torch.equal(runner.drafter.embed_tokens, own["embed_tokens.weight"])
    llm = engine.make_llm(target, draft, max_model_len=64)
    recorder = engine.Recorder(llm)
    llm.generate([TOKEN_IDS], engine.greedy_params(2))
    proposal = recorder.proposals[0]
    runner.observe(runner.verify(TOKEN_IDS)[1])
    hidden = runner.draft(proposal.bonus, len(TOKEN_IDS), 3)
    best = (hidden[1:] @ own["lm_head.weight"].T).argmax(-1)
    assert proposal.proposed == (best + own["d2t"][best]).tolist()
