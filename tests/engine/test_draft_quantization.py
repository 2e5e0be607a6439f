# SPDX-License-Identifier: Apache-2.0
"""A drafter with fp8 matrices drafts almost as well; what the engine answers is the same."""

from __future__ import annotations

import pytest
import torch

from dflash import SamplingParams
from dflash.checkpoints.quantize import quantize_draft
from dflash.checkpoints.weights import Fp8Matrix, load_draft
from dflash.engine.memory import tensor_bytes
from dflash.models.linear import linear, linear_silu_mul
from tests.support import tiny
from tests.support.engine import greedy_params, make_llm

from .conftest import NUM_TOKENS, PROMPTS

MATRICES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def drafter_of(llm):
    return llm.core._step.speculator.drafter


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def biased_draft(tmp_path):
    return tiny.make_draft(tmp_path, attention_bias=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_close_and_the_rest_untouched(dtype, biased_draft):
    config, weights, _ = load_draft(biased_draft, dtype)
    quantized = quantize_draft(config, weights)
    pairs = [(weights.fc, quantized.fc)]
    for whole, small in zip(weights.layers, quantized.layers, strict=True):
        pairs += [(getattr(whole, name), getattr(small, name)) for name in MATRICES]
        for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "qkv_bias", "o_bias"):
            assert getattr(small, name) is getattr(whole, name)
    for whole, small in pairs:
        assert isinstance(small, Fp8Matrix) and small.weight.dtype == torch.float8_e4m3fn
        if small.in_turns:
            continue
        x = torch.randn(5, whole.shape[1], dtype=dtype)
        exact, got = linear(x, whole).float(), linear(x, small).float()
        assert 1e-4 < (got - exact).norm() / exact.norm() < 0.05
    layer, small = weights.layers[0], quantized.layers[0]
    x = torch.randn(5, layer.qkv_proj.shape[1], dtype=dtype)
    exact = linear(x, layer.qkv_proj, layer.qkv_bias).float()
    assert (linear(x, small.qkv_proj, small.qkv_bias) - exact).norm() < 0.05 * exact.norm()
    assert small.gate_up_proj.in_turns
    exact = linear_silu_mul(x, layer.gate_up_proj).float()
    assert (linear_silu_mul(x, small.gate_up_proj) - exact).norm() < 0.08 * exact.norm()
    query_size = config.decoder.num_heads * config.decoder.head_dim
    kv = torch.cat([layer.qkv_proj[query_size:] for layer in weights.layers])
    assert torch.equal(quantized.kv_proj, kv)


def test_gate_and_up_that_cannot_take_turns_are_two_ops(tmp_path):
    config, weights, _ = load_draft(tiny.make_draft(tmp_path, intermediate_size=92))
    layer, small = weights.layers[0], quantize_draft(config, weights).layers[0]
    assert not small.gate_up_proj.in_turns
    x = torch.randn(5, layer.gate_up_proj.shape[1])
    exact = linear_silu_mul(x, layer.gate_up_proj)
    assert (linear_silu_mul(x, small.gate_up_proj) - exact).norm() < 0.08 * exact.norm()


def test_the_output_is_the_same_tokens(target, draft, answers):
    llm = make_llm(target, draft, max_model_len=128, draft_quantization="fp8")
    assert isinstance(drafter_of(llm).fc, Fp8Matrix)
    assert tokens_of(llm.generate(PROMPTS, greedy_params(NUM_TOKENS))) == answers
    assert llm.statistics.num_output_tokens == NUM_TOKENS * len(PROMPTS)
    plain = llm.without_draft()
    assert plain.args.draft_quantization is None
    sampled = SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True)
    assert tokens_of(llm.generate(PROMPTS, sampled)) == tokens_of(plain.generate(PROMPTS, sampled))


def test_a_drafter_with_biases(target, biased_draft, answers):
    llm = make_llm(target, biased_draft, max_model_len=128, draft_quantization="fp8")
    assert tokens_of(llm.generate(PROMPTS, greedy_params(NUM_TOKENS))) == answers


def test_drafts_are_mostly_those_of_the_whole_drafter(target, draft):
    """By the acceptance length of the same work."""
    lengths = []
    for quantization in (None, "fp8"):
        llm = make_llm(target, draft, max_model_len=128, draft_quantization=quantization)
        llm.generate(PROMPTS, greedy_params(NUM_TOKENS))
        lengths.append(llm.statistics.acceptance_length)
    assert lengths[1] == pytest.approx(lengths[0], rel=0.2)


def test_the_memory_profile_counts_the_smaller_weights(target, draft):
    whole = make_llm(target, draft, max_model_len=64)
    small = make_llm(target, draft, max_model_len=64, draft_quantization="fp8")
    removed = added = 0
    layers = zip(drafter_of(whole).decoder.layers, drafter_of(small).decoder.layers, strict=True)
    pairs = [(drafter_of(whole).fc, drafter_of(small).fc)]
    pairs += [(getattr(a, name), getattr(b, name)) for a, b in layers for name in MATRICES]
    for matrix, quantized in pairs:
        removed += tensor_bytes(matrix)
        added += tensor_bytes(quantized)
        m, k = matrix.shape
        assert tensor_bytes(quantized) == (m + -m % 64) * (k + -k % 64) + 4 * m
    before, after = whole.facts.memory, small.facts.memory
    assert before.weights - after.weights == removed - added > 0
    assert (before.buffers, before.activations) == (after.buffers, after.activations)


@pytest.mark.parametrize(
    "which,arguments,message",
    [
        ("draft", {"draft_quantization": "int4"}, "draft_quantization 'int4': expected None or one of fp8"),
        (None, {"draft_quantization": "fp8"}, "draft_quantization needs a drafter"),
        (
            "target",
            {"draft_quantization": "fp8", "draft_method": "autoregressive"},
            "draft_quantization is for DFlash drafters, not draft_method 'autoregressive'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(which, arguments, message, target, draft):
    chosen = {"draft": draft, "target": target, None: None}[which]
    with pytest.raises(ValueError, match=message):
        make_llm(target, chosen, **arguments)
