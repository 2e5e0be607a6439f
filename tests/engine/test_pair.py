# SPDX-License-Identifier: Apache-2.0
"""Pairs of checkpoints that do not match row for row, or not at all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.conftest import PROMPTS
from tests.support import engine, tiny


def test_padding_rows_are_never_proposed(draft, tmp_path):
    """The target's head has 16 rows more than the drafter's vocabulary, and the largest logits."""
    target = tiny.make_target(tmp_path, vocab_size=48)
    path = target / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"][32:] *= 8
    save_file(tensors, path, metadata={"format": "pt"})
    llm = engine.make_llm(target, draft, max_model_len=64)
    recorder = engine.Recorder(llm)
    llm.generate(PROMPTS, engine.greedy_params(8, ignore_eos=True))
    proposed = torch.tensor([p.proposed for p in recorder.proposals])
    assert ((proposed >= 0) & (proposed < 32)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 6}, "6 layers"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2, 5]}}, "layers"),
        ({"vocab_size": 4096}, "vocabulary"),
        ({"hidden_size": 128}, "fc takes"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes, message, target, tmp_path):
    with pytest.raises(ValueError, match=message):
        engine.make_llm(target, tiny.make_draft(tmp_path, **changes))
