# SPDX-License-Identifier: Apache-2.0
"""Context K/V under vLLM, on small stand-ins for its objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dflash.integrations.vllm import context_kv
from dflash.log import _seen
from dflash.ops.precompute_context_kv import precompute_context_kv_reference

LAYERS, HEADS, D, H, BLOCKS, BLOCK = 3, 2, 64, 48, 6, 16


class Impl:
    def do_kv_cache_update(self):
        raise AssertionError("the fused store writes the cache")


class OtherImpl(Impl):
    def do_kv_cache_update(self):
        raise AssertionError


class Model(torch.nn.Module):
    """What the store reads of vLLM's model; its own store is the reference."""

    def __init__(self, rope_dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self._num_attn_layers, self._head_dim = LAYERS, D
        self._hidden_norm_weight = torch.rand(H) + 0.5
        self._fused_kv_weight = torch.randn(LAYERS * 2 * HEADS * D, H) / 7
        self._fused_kv_bias = torch.randn(LAYERS * 2 * HEADS * D)
        self._k_norm_weights = torch.rand(LAYERS, D) + 0.5
        self._rope_cos_sin_cache = torch.randn(64, D).to(rope_dtype)
        self._rope_is_neox, self._rms_norm_eps = True, 1e-6
        self.layers = [SimpleNamespace(self_attn=SimpleNamespace())]
        self.rebind()

    def rebind(self):
        def layer():
            return SimpleNamespace(impl=Impl(), kv_cache=torch.zeros(BLOCKS, HEADS, BLOCK, 2 * D))

        self._attn_layers = [layer() for _ in range(LAYERS)]

    def _project_context_kv(self):
        raise AssertionError

    def _normalize_context_k(self):
        raise AssertionError

    def precompute_and_store_context_kv(self, states, positions, slots=None):
        self.original_calls = getattr(self, "original_calls", 0) + 1

    @property
    def caches(self):
        return [layer.kv_cache.clone() for layer in self._attn_layers]


def fused(model_class=Model):
    original = Model.precompute_and_store_context_kv
    return context_kv.with_fused_store(original, model_class, Impl.do_kv_cache_update)


def expected_caches(model, states, positions, slots, value_scale=1.0):
    layers = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * D) for _ in range(LAYERS)]
    keys = [layer.transpose(1, 2)[..., :D] for layer in layers]
    values = [layer.transpose(1, 2)[..., D:] for layer in layers]
    precompute_context_kv_reference(
        states, model._hidden_norm_weight, 1e-6, model._fused_kv_weight, model._fused_kv_bias,
        model._k_norm_weights, model._rope_cos_sin_cache.float(), True, positions, slots,
        list(range(LAYERS)), value_scale, None, None, keys, values,
    )  # fmt: skip
    return layers


@pytest.fixture
def rows():
    states, positions = torch.randn(5, H), torch.tensor([3, 4, 17, 0, 9])
    slots = torch.tensor([[19, 20, 33, -1, 25], [40, 41, 42, -1, 50]])
    return states, positions, slots


@pytest.mark.parametrize("rope_dtype", [torch.float32, torch.bfloat16])
def test_context_kv_goes_into_vllms_cache_layout(rows, rope_dtype):
    states, positions, slots = rows
    model, store = Model(rope_dtype), fused()
    store(model, states, positions, slots[0])
    expected = expected_caches(model, states, positions, [slots[0]] * LAYERS)
    torch.testing.assert_close(model.caches, expected, rtol=1e-4, atol=1e-4)
    assert not hasattr(model, "original_calls")


def test_each_layer_stores_into_the_slots_of_its_group(rows):
    states, positions, slots = rows
    model = Model()
    model.layers[0].self_attn.v_scale = 2.0
    per_layer = [slots[0], slots[1], slots[0]]
    fused()(model, states, positions, per_layer)
    expected = expected_caches(model, states, positions, per_layer, value_scale=2.0)
    torch.testing.assert_close(model.caches, expected, rtol=1e-4, atol=1e-4)


def test_a_cache_that_vllm_binds_anew_is_the_one_written(rows):
    states, positions, slots = rows
    model, store = Model(), fused()
    store(model, states, positions, slots[0])
    first, old = model.caches, model._attn_layers
    model.rebind()
    store(model, states, positions, slots[0])
    torch.testing.assert_close(model.caches, first)
    torch.testing.assert_close([layer.kv_cache for layer in old], first)


def test_a_larger_cache_at_the_old_address_is_seen(rows):
    """A profile's small caches are freed, and the real ones may start where they did."""
    states, positions, slots = rows
    model, store = Model(), fused()
    backing = [layer.kv_cache for layer in model._attn_layers]
    for layer, whole in zip(model._attn_layers, backing, strict=True):
        layer.kv_cache = whole[:3]
    store(model, states, positions, slots[0].clamp(max=47))
    for layer, whole in zip(model._attn_layers, backing, strict=True):
        layer.kv_cache = whole.zero_()
    store(model, states, positions, slots[1])  # slots past the small cache
    expected = expected_caches(model, states, positions, [slots[1]] * LAYERS)
    torch.testing.assert_close(model.caches, expected, rtol=1e-4, atol=1e-4)


class OwnProjection(Model):
    def _project_context_kv(self):
        raise AssertionError


@pytest.mark.parametrize(
    "left", ["dummy", "early", "partly", "quantised", "subclass", "impl", "layout", "dtype"]
)
def test_what_is_not_served_goes_the_original_way(rows, left):
    states, positions, slots = rows
    model = OwnProjection() if left == "subclass" else Model()
    given = slots[0]
    if left == "dummy":
        given = None
    elif left == "early":
        del model._num_attn_layers
    elif left == "partly":
        given = [slots[0], None, slots[0]]
    elif left == "quantised":
        model._fused_kv_weight = None
    elif left == "impl":
        model._attn_layers[2].impl = OtherImpl()
    elif left == "layout":
        model._attn_layers[1].kv_cache = torch.zeros(2, BLOCKS, BLOCK, HEADS, D)
    elif left == "dtype":
        model._attn_layers[0].kv_cache = model._attn_layers[0].kv_cache.half()
    fused()(model, states, positions, given)
    assert model.original_calls == 1
    assert all(not cache.any() for cache in model.caches)


def test_nothing_that_graphs_share_is_made_during_a_capture(rows, monkeypatch, caplog):
    states, positions, slots = rows
    model, store = Model(), fused()
    monkeypatch.setattr(context_kv, "is_capturing", lambda tensor: True)
    _seen.clear()
    with caplog.at_level("WARNING", "dflash"):
        store(model, states, positions, slots[0])
    assert model.original_calls == 1 and "is left in a graph captured" in caplog.text
    assert "_dflash_plan" not in vars(model)
    monkeypatch.undo()
    store(model, states, positions, slots[0])  # the warm-up before a capture
    monkeypatch.setattr(context_kv, "is_capturing", lambda tensor: True)
    before = model.caches
    store(model, states, positions, slots[1])
    assert model.original_calls == 1 and any(
        a.ne(b).any() for a, b in zip(model.caches, before, strict=True)
    )
