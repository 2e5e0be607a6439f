# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's arguments, and a decoder over backends that differ by layer group."""

import sys
from dataclasses import replace

import pytest
import torch
from benchmarks.shapes import RandomWeights, qwen3_8b

from dflash.attention import flash_attn
from dflash.attention.flash_attn import FlashAttention
from dflash.checkpoints.config import LayerAttention
from dflash.models.decoder import Decoder, DecoderSettings
from tests.attention.batches import SPEC, Pool, worst_row

CPU = torch.device("cpu")


FAKE_FA3 = """
import torch

def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q,
                            max_seqlen_q, softmax_scale, causal, window_size):
    output, left, right = torch.zeros_like(q), *window_size
    group = q.shape[1] // k_cache.shape[2]
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    for r, n in enumerate(cache_seqlens.tolist()):
        rows = slice(int(cu_seqlens_q[r]), int(cu_seqlens_q[r + 1]))
        key, value = (c[page_table[r].long()].flatten(0, 1)[:n].repeat_interleave(group, 1)
                      for c in (k_cache, v_cache))
        p = torch.arange(n - (rows.stop - rows.start), n)[:, None]
        k = torch.arange(n)
        seen = torch.ones(len(p), n, dtype=torch.bool)
        seen &= ~torch.tensor(causal) | (k <= p)
        seen &= (left < 0) | (p - k <= left)
        seen &= (right < 0) | (k - p <= right)
        weights = torch.einsum("qhd,khd->hqk", q[rows], key) * softmax_scale
        weights = weights.masked_fill(~seen, float("-inf")).softmax(-1) if n else weights
        output[rows] = torch.einsum("hqk,khd->qhd", weights, value)
    return output
"""


@pytest.fixture
def fake_fa3(monkeypatch, tmp_path):
    assert "not installed" in flash_attn.missing()
    (tmp_path / "flash_attn_interface.py").write_text(FAKE_FA3)
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attn.missing() is None
    yield
    sys.modules.pop("flash_attn_interface")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 20])
def test_flash_attn_gets_the_page_table_as_it_is(fake_fa3, causal, window):
    spec = replace(SPEC, causal=causal, window=window)
    pool, backend = Pool(spec, 4, 160), FlashAttention(spec, CPU)
    query, batch = pool.batch([(1, 100), (7, 0), (30, 30), (3, 150)])
    output = backend.forward(query, pool.cache, batch, None)
    assert worst_row(output, pool.expected(query, batch)) < 1e-5


def _decoder(backend, layers):
    config = replace(
        qwen3_8b().decoder, hidden_size=64, intermediate_size=64, num_heads=2, num_kv_heads=1,
        head_dim=64, vocab_size=32, num_layers=len(layers), layers=layers,
    )  # fmt: skip
    target = replace(qwen3_8b(), decoder=config)
    weights = RandomWeights(torch.float32, CPU).target(target)
    settings = DecoderSettings(CPU, torch.float32, torch.float32, 16, 128, backend)
    return Decoder(config, weights.layers, weights.norm, settings)


def test_a_decoder_asks_the_backend_of_every_group():
    layers = (LayerAttention(False), LayerAttention(True, 32), LayerAttention(False))
    decoder = _decoder("auto", layers)
    assert list(decoder.backends) == [layers[0], layers[1]]
    assert decoder.eager_reason is None
    calls = []
    for group, backend in decoder.backends.items():
        for name in ("prepare", "init_capture", "prepare_capture", "prepare_replay"):
            setattr(backend, name, lambda arg, at=(name, group): calls.append((*at, arg)))
    for name in ("prepare", "init_capture", "prepare_capture", "prepare_replay"):
        getattr(decoder, name)("argument")
        assert calls == [(name, group, "argument") for group in decoder.backends]
        calls.clear()


def test_a_decoder_refuses_a_capture_that_may_not_be_replayed():
    decoder = _decoder("sdpa", (LayerAttention(True),))
    assert decoder.eager_reason == "attention backend sdpa: it reads the lengths on the host"
    with pytest.raises(ValueError, match="cannot be captured: attention backend sdpa"):
        decoder.prepare_capture(None)
