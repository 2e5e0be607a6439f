# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch
from benchmarks.shapes import WEIGHTS, qwen3_8b, qwen3_8b_draft

CPU = torch.device("cpu")


def tensors(weights):
    layers = [tensor for layer in weights.layers for tensor in vars(layer).values()]
    rest = [value for name, value in vars(weights).items() if name != "layers"]
    return [tensor for tensor in (*layers, *rest) if tensor is not None]


def pair(name):
    """All tensors of a small target and drafter."""
    small = dict(hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1, vocab_size=64)
    target, draft = qwen3_8b(), qwen3_8b_draft()
    decoder = replace(target.decoder, num_layers=2, **small)
    random = WEIGHTS[name](torch.bfloat16, CPU)
    made = random.target(replace(target, decoder=decoder))
    decoder = replace(draft.decoder, num_layers=2, **small)
    drafted = random.draft(replace(draft, decoder=decoder, target_hidden_size=64))
    return tensors(made) + tensors(drafted)


def test_uniform_weights_are_vllms_dummy_weights():
    """Every parameter, norms too, is uniform within 0.001 of 0: vLLM's initialize_dummy_weights."""
    for tensor in pair("uniform"):
        values = tensor.float()
        assert values.abs().max() <= 1e-3
        assert values.std() == pytest.approx(1e-3 / 3**0.5, rel=0.35 if tensor.dim() == 1 else 0.1)
        assert abs(values.mean()) < 3e-4


def test_normal_weights_keep_activations_of_order_one():
    for tensor in pair("normal"):
        if tensor.dim() == 1:
            assert torch.all(tensor == 1)
        else:
            assert tensor.float().std() == pytest.approx(tensor.shape[1] ** -0.5, rel=0.1)


def test_both_have_the_same_shapes():
    normal, uniform = pair("normal"), pair("uniform")
    assert [t.shape for t in normal] == [t.shape for t in uniform]
    assert {t.dtype for t in normal + uniform} == {torch.bfloat16}
