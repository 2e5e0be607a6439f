# SPDX-License-Identifier: Apache-2.0
"""The vLLM plugin without vLLM: small stand-ins for its objects, and files whose source is or is not the one known."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dflash import _library
from dflash.integrations import vllm as plugin
from dflash.integrations.vllm import attention, context_kv, sampling
from dflash.integrations.vllm.known import PARTS, Part, Version
from dflash.integrations.vllm.sources import source_hash
from dflash.log import _seen
from dflash.ops.paged_attention import paged_attention_reference
from dflash.ops.precompute_context_kv import precompute_context_kv_reference

SOURCE = """\
import functools

class Model:
    @functools.cache
    def store(self):
        return 1

def other():
    return 2
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "model.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture
def installed(monkeypatch):
    """A module whose `install` says that it ran, and whose `fail` raises."""
    calls = []
    module = ModuleType("peer_install")
    module.install = lambda: calls.append("install")
    module.fail = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "peer_install", module)
    return calls


def part(root, install="peer_install:install", version="1.0"):
    names = ["peer.model:Model.store", "peer.model:other"]
    return Part("the part", {version: Version(install, {n: source_hash(root, n) for n in names})})


def test_a_hash_covers_a_definition_with_its_decorators_and_nothing_else(root):
    hashes = [source_hash(root, f"peer.model:{n}") for n in ("Model.store", "other", "Model")]
    file = root / "peer" / "model.py"
    file.write_text("X = 1\n" + SOURCE.replace("return 2", "return 3"))
    assert source_hash(root, "peer.model:Model.store") == hashes[0]
    assert source_hash(root, "peer.model:other") != hashes[1]
    file.write_text(SOURCE.replace("    @functools.cache\n", ""))
    assert source_hash(root, "peer.model:Model.store") != hashes[0]
    assert source_hash(root, "peer.model:absent") is None
    assert source_hash(root, "peer.nowhere:other") is None


def test_a_part_is_taken_over_only_where_every_source_is_known(root, installed):
    known = part(root)
    assert plugin.install(root, "1.0", [known]) == (["the part"], [])
    assert installed == ["install"]
    (root / "peer" / "model.py").write_text(SOURCE.replace("return 2", "return 3"))
    taken, left = plugin.install(root, "1.0", [known])
    assert (taken, left) == ([], ["the part: not the source we know: peer.model:other"])
    taken, left = plugin.install(root, "1.1", [known])
    assert taken == [] and "vLLM 1.1 (known: 1.0)" in left[0]
    assert installed == ["install"]


def test_a_part_that_fails_to_install_is_left(root, installed):
    taken, left = plugin.install(root, "1.0", [part(root, "peer_install:fail"), part(root)])
    assert taken == ["the part"] and "ZeroDivisionError" in left[0]


def test_the_plugin_is_off_unless_asked_for(monkeypatch, root, installed, caplog):
    found = []

    def find():
        found.append(1)
        return root, "1.0"

    monkeypatch.setattr(plugin, "find_vllm", find)
    monkeypatch.setattr(plugin.install, "__defaults__", ([part(root)],))
    for value in (None, "0", ""):
        monkeypatch.delenv("DFLASH_VLLM", raising=False)
        if value is not None:
            monkeypatch.setenv("DFLASH_VLLM", value)
        plugin.register()
    assert found == installed == []
    monkeypatch.setenv("DFLASH_VLLM", "1")
    _seen.clear()
    with caplog.at_level(logging.WARNING, "dflash"):
        monkeypatch.setattr(_library, "cuda_library_error", "torch is a CPU build")
        plugin.register()
        assert "nothing taken over: torch is a CPU build" in caplog.text and installed == []
        monkeypatch.setattr(_library, "cuda_library_error", None)
        plugin.register()
        plugin.register()
    assert caplog.text.count("taken over: the part; left: input preparation") == 1


def test_the_entry_point_and_the_parts_exist():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    entry = re.search(
        r'\[project.entry-points."vllm.general_plugins"\]\ndflash = "(.*):(.*)"', text
    )
    assert getattr(importlib.import_module(entry[1]), entry[2]) is plugin.register
    for known in PARTS:
        assert list(known.versions) == ["0.26.0", "0.33.0"]
        for version in known.versions.values():
            module, _, function = version.install.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
            assert all(re.fullmatch(r"[0-9a-f]{16}", x) for x in version.functions.values())


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


def test_nothing_that_graphs_share_is_made_during_a_capture(rows, monkeypatch):
    states, positions, slots = rows
    model, store, speculator = Model(), fused(), Speculator()
    for module in (context_kv, sampling):
        monkeypatch.setattr(module, "is_capturing", lambda tensor: True)
    store(model, states, positions, slots[0])
    assert model.original_calls == 1
    tokens = sampling.argmax(speculator, speculator.logits)
    assert torch.equal(tokens, speculator.logits.argmax(-1))
    assert "_dflash_sampling" not in vars(speculator) and "_dflash_plan" not in vars(model)
    monkeypatch.undo()
    store(model, states, positions, slots[0])  # the warm-up before a capture
    sampling.argmax(speculator, speculator.logits)
    for module in (context_kv, sampling):
        monkeypatch.setattr(module, "is_capturing", lambda tensor: True)
    before = model.caches
    store(model, states, positions, slots[1])
    assert model.original_calls == 1 and any(
        a.ne(b).any() for a, b in zip(model.caches, before, strict=True)
    )


class Speculator(SimpleNamespace):
    def __init__(self, **changes):
        logits = torch.randn(12, 100)
        logits[3, 7] = logits[3, 50] = 9.0
        super().__init__(
            use_local_argmax_reduction=False, acceptance_estimator=None, max_num_reqs=4, num_speculative_steps=3,
            logits=logits, model=SimpleNamespace(compute_logits=lambda hidden: logits[: len(hidden)]),
            compute_draft_logits=lambda hidden, step: logits[: len(hidden)], **changes,
        )  # fmt: skip


def forwarded(self, *args, **kwargs):
    return "vLLM's"


@pytest.mark.parametrize("rows", [0, 5, 12])
def test_draft_tokens_are_the_first_maxima(rows):
    speculator, hidden = Speculator(), torch.zeros(rows, 8)
    expected = speculator.logits[:rows].argmax(-1)
    old = sampling.with_one_kernel(forwarded)
    new = sampling.without_logits_record(forwarded)
    for _ in range(2):
        assert torch.equal(old(speculator, hidden), expected)
        assert torch.equal(new(speculator, hidden, 1, 2, 3, 4, 5, None, num_steps=3), expected)
    assert torch.equal(
        sampling.argmax(speculator, torch.randn(40, 9).fill_(1.0)), torch.zeros(40).long()
    )


def test_other_ways_to_sample_stay_vllms():
    hidden, record = torch.zeros(3, 8), torch.zeros(1)
    old, new = sampling.with_one_kernel(forwarded), sampling.without_logits_record(forwarded)
    local = Speculator()
    local.use_local_argmax_reduction = True
    assert old(local, hidden) == new(local, hidden, 1, 2, 3, 4, 5, None) == "vLLM's"
    estimating = Speculator()
    estimating.acceptance_estimator = object()
    assert new(estimating, hidden, 1, 2, 3, 4, 5, None) == "vLLM's"
    assert new(Speculator(), hidden, 1, 2, 3, 4, 5, record) == "vLLM's"
    assert new(Speculator(), hidden, draft_logits=record) == "vLLM's"


def impl(**changes):
    served = dict(
        attn_type="decoder", sliding_window=(-1, -1), head_size=D, kv_cache_dtype="auto", alibi_slopes=None,
        logits_soft_cap=0, sinks=None, dcp_world_size=1, scale=D**-0.5,
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
