# SPDX-License-Identifier: Apache-2.0
"""A drafter with fp8 matrices drafts almost as well; what the engine answers is the same."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch

from dflash import SamplingParams, log
from dflash.checkpoints import quantize
from dflash.checkpoints.matrix import Fp8Matrix
from dflash.checkpoints.quantize import quantize_draft
from dflash.checkpoints.weights import load_draft
from dflash.engine.memory import tensor_bytes
from dflash.errors import CheckpointError
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


def test_a_cpu_says_once_that_it_does_not_pay(biased_draft, caplog, monkeypatch):
    monkeypatch.setattr(log, "_seen", set())
    caplog.set_level(logging.WARNING, "dflash")
    for _ in range(2):
        quantize_draft(*load_draft(biased_draft, torch.float32)[:2])
    assert sum("on a CPU drafts take longer" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_fp8_cannot_scale_is_refused(value, biased_draft):
    config, weights, _ = load_draft(biased_draft, torch.float32)
    weights.fc[1, 2] = value
    with pytest.raises(CheckpointError, match="drafter's fc holds NaN or infinity in float32"):
        quantize_draft(config, weights)


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


def first_query(llm, monkeypatch):
    """Input ids and hidden states of the drafter's first pass for PROMPTS."""
    passes, drafter = [], drafter_of(llm)
    forward = drafter.forward

    def recorded(input_ids, batch):
        hidden = forward(input_ids, batch)
        passes.append((input_ids.clone(), hidden.clone()))
        return hidden

    monkeypatch.setattr(drafter, "forward", recorded)
    llm.generate(PROMPTS, greedy_params(4))
    return passes[0]


def test_drafts_are_made_of_hidden_states_close_to_the_whole_drafters(target, draft, monkeypatch):
    (ids, whole), (same_ids, small) = (
        first_query(
            make_llm(target, draft, max_model_len=128, draft_quantization=quantization),
            monkeypatch,
        )
        for quantization in (None, "fp8")
    )
    assert torch.equal(ids, same_ids)
    assert 1e-4 < (small - whole).norm() / whole.norm() < 0.1


def test_nobody_keeps_the_matrices_as_they_were_loaded(target, draft, monkeypatch):
    loaded = []

    def watched(*arguments):
        config, weights, directory = load_draft(*arguments)
        matrices = [weights.fc, *(getattr(layer, n) for layer in weights.layers for n in MATRICES)]
        loaded.extend(weakref.ref(matrix) for matrix in matrices)
        return config, weights, directory

    monkeypatch.setattr(quantize, "load_draft", watched)
    llm = make_llm(target, draft, max_model_len=64, draft_quantization="fp8")
    assert isinstance(drafter_of(llm).fc, Fp8Matrix)
    assert len(loaded) == 9 and all(matrix() is None for matrix in loaded)


def test_matrices_are_packed_the_same_in_parts(draft, monkeypatch):
    """A part is whole tiles of rows: gate and up, [192, 64], are three, each half of either."""
    config, weights, _ = load_draft(draft, torch.bfloat16)
    at_once = quantize_draft(config, weights)
    monkeypatch.setattr(quantize, "PART_BYTES", 1)
    in_parts = quantize_draft(config, weights)
    for a, b in zip([at_once, *at_once.layers], [in_parts, *in_parts.layers], strict=True):
        for name in ("fc",) if a is at_once else MATRICES:
            one, other = getattr(a, name), getattr(b, name)
            assert torch.equal(one.weight.view(torch.uint8), other.weight.view(torch.uint8))
            assert torch.equal(one.scale, other.scale)


@pytest.mark.gpu
def test_a_gpu_says_once_what_it_unpacks(draft, caplog):
    caplog.set_level(logging.WARNING, "dflash")
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        quantized = quantize_draft(*load_draft(draft, dtype, "cuda")[:2])
        streams = dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] == 9
        matrices = [quantized.fc, *(getattr(quantized.layers[0], name) for name in MATRICES)]
        assert all(matrix.is_streamed is streams for matrix in matrices)
        assert quantized.layers[0].gate_up_proj.in_turns is streams
    said = [r.message for r in caplog.records if "are not streamed" in r.message]
    assert sum("fc, qkv_proj, o_proj, gate_up_proj, down_proj in float32" in m for m in said) == 1


@pytest.mark.gpu
def test_a_gpu_gets_back_what_the_loaded_matrices_took(target, tmp_path):
    """192 MiB of 16-bit weights, whose successors have half of it."""
    wide = tiny.make_draft(tmp_path, intermediate_size=1 << 18)

    def memory(quantization):
        gc.collect()
        torch.cuda.empty_cache()
        arguments = {"device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 64}
        arguments |= {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "max_num_seqs": 2}
        llm = make_llm(target, wide, max_model_len=64, draft_quantization=quantization, **arguments)
        return llm.facts.memory

    memory(None), memory("fp8")  # kernels are loaded, workspaces made
    whole, small = memory(None), memory("fp8")
    assert whole.weights - small.weights > 80 << 20
    assert small.others < whole.others + (40 << 20)


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
