# SPDX-License-Identifier: Apache-2.0
"""Draft attention under vLLM, on small stand-ins for its objects."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dflash.integrations.vllm import attention, context_kv
from dflash.ops.paged_attention import paged_attention_reference

HEADS, D, BLOCKS, BLOCK = 2, 64, 6, 16


def impl(**changes):
    served = dict(
        attn_type="decoder", sliding_window=(-1, -1), head_size=D, kv_cache_dtype="auto", alibi_slopes=None,
        logits_soft_cap=0, sinks=None, dcp_world_size=1, scale=D**-0.5, batch_invariant_enabled=False,
    )  # fmt: skip
    return SimpleNamespace(**(served | changes))


def metadata(**changes):
    """Two requests of 4 rows over 21 and 7 keys, and a padded one; a tail of 2 rows."""
    served = dict(
        num_actual_tokens=8, max_query_len=4, max_seq_len=64, causal=False, use_cascade=False, sliding_window=None,
        query_start_loc=torch.tensor([0, 4, 8, 8], dtype=torch.int32),
        seq_lens=torch.tensor([21, 7, 0], dtype=torch.int32),
        block_table=torch.tensor([[1, 2], [4, 0], [0, 0]], dtype=torch.int32),
        mm_prefix_range_tensor=None, rswa_prefix_lens=None,
    )  # fmt: skip
    return SimpleNamespace(**(served | changes))


@pytest.mark.parametrize(
    "change,reason",
    [
        ({}, None),
        ({"attn_type": "encoder"}, "attention of type encoder"),
        ({"sliding_window": (15, 0)}, "a sliding window"),
        ({"head_size": 80}, "heads of 80"),
        ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"batch_invariant_enabled": True}, "batch invariance"),
        ({"dcp_world_size": 2}, "context parallelism"),
    ],
)
def test_layers_that_are_left_say_why(change, reason):
    assert attention.layer_refusal(impl(**change), "decoder") == reason


def test_batches_that_are_left():
    assert attention.batch_is_served(metadata())
    assert attention.batch_is_served(metadata(sliding_window=(-1, -1)))
    for change in (
        {"use_cascade": True},
        {"causal": torch.zeros(1)},
        {"sliding_window": (7, 7)},
        {"mm_prefix_range_tensor": torch.zeros(1)},
        {"mm_prefix_query_range_tensor": torch.zeros(1)},
        {"rswa_prefix_lens": torch.zeros(1)},
    ):
        assert not attention.batch_is_served(metadata(**change)), change


@pytest.fixture
def backend(monkeypatch):
    """dflash.integrations.vllm.backend over stand-ins for the classes of vLLM that it extends."""

    class Base:
        def __init__(self, **attributes):
            self.__dict__.update(vars(impl()) | attributes)
            self.aot_schedule = True

        def forward(self, *args):
            return "FlashAttention"

    flash = ModuleType("vllm.v1.attention.backends.flash_attn")
    flash.FlashAttentionBackend = flash.FlashAttentionImpl = flash.FlashAttentionMetadataBuilder = (
        Base
    )
    abstract = ModuleType("vllm.v1.attention.backend")
    abstract.AttentionType = SimpleNamespace(DECODER="decoder")
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, flash.__name__, flash)
    monkeypatch.setitem(sys.modules, abstract.__name__, abstract)
    monkeypatch.delitem(sys.modules, "dflash.integrations.vllm.backend", raising=False)
    yield importlib.import_module("dflash.integrations.vllm.backend")
    sys.modules.pop("dflash.integrations.vllm.backend", None)


@pytest.mark.parametrize("causal", [False, True])
def test_the_backend_attends_over_vllms_cache(backend, causal):
    module, _, name = attention.BACKEND.rpartition(".")
    assert getattr(sys.modules[module], name) is backend.DFlashBackend
    assert backend.DFlashBackend.get_name() == "CUSTOM"
    assert not backend.DFlashBackend.get_builder_cls()().aot_schedule
    layer = backend.DFlashBackend.get_impl_cls()()
    query, cache = torch.randn(10, 4, D), torch.randn(BLOCKS, HEADS, BLOCK, 2 * D)
    batch, output = metadata(causal=causal), torch.full((10, 4, D), 7.0)
    assert layer.forward(None, query, None, None, cache, batch, output) is output
    keys, values = context_kv.split_cache(cache, D)
    expected = paged_attention_reference(
        query[:8], keys, values, batch.block_table, batch.seq_lens, batch.query_start_loc, 4, 64, D**-0.5, causal
    )  # fmt: skip
    torch.testing.assert_close(output[:8], expected, rtol=1e-5, atol=1e-5)
    assert (output[8:] == 7.0).all()


def test_the_backend_leaves_the_rest_to_flash_attention(backend):
    query, cache, output = (
        torch.randn(8, 4, D),
        torch.randn(BLOCKS, HEADS, BLOCK, 2 * D),
        torch.zeros(8, 4, D),
    )

    def forward(layer, batch, *scales):
        return layer.forward(None, query, None, None, cache, batch, output, *scales)

    layer = backend.DFlashImpl()
    assert forward(layer, None) == forward(layer, metadata(use_cascade=True)) == "FlashAttention"
    assert forward(layer, metadata(), torch.ones(1)) == "FlashAttention"
    assert forward(backend.DFlashImpl(sliding_window=(15, 0)), metadata()) == "FlashAttention"
    assert not output.any()


def test_a_backend_of_another_plugin_stays(monkeypatch):
    registered = []
    registry = ModuleType("vllm.v1.attention.backends.registry")
    custom = SimpleNamespace(
        is_overridden=lambda: bool(registered), get_path=lambda: registered[-1]
    )
    registry.AttentionBackendEnum = SimpleNamespace(CUSTOM=custom)
    registry.register_backend = lambda backend, path: registered.append(path)
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    attention.install()
    attention.install()  # a second time in one process
    assert set(registered) == {attention.BACKEND}
    registered.append("somebody.elses.Backend")
    with pytest.raises(RuntimeError, match="another plugin has registered"):
        attention.install()
