# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.precompute_context_kv import precompute_context_kv, precompute_context_kv_reference

from .kv_support import (
    FP8,
    MAX_POSITIONS,
    POISON,
    assert_cache_close,
    make_cache,
    make_rope,
    make_slots,
)
from .support import DEVICES, DTYPES, check_op

EPS = 1e-6


def make(
    rows=3,
    num_layers=2,
    num_kv_heads=2,
    head_dim=64,
    dtype=torch.float32,
    device="cpu",
    *,
    hidden_size=96,
    kv_block_size=16,
    layout="NHD",
    cache_dtype=None,
    rotary_dim=None,
    is_neox=True,
    norm=True,
    bias=False,
    value_scale=1.0,
):
    """The op's arguments by name: one group, every layer in it."""
    slots, num_blocks = make_slots(rows, kv_block_size, device)
    shape = (
        num_blocks,
        kv_block_size,
        num_kv_heads,
        head_dim,
        cache_dtype or dtype,
        device,
        layout,
    )
    kv_size = num_layers * 2 * num_kv_heads * head_dim
    scales = torch.linspace(0.02, 0.05, num_layers, device=device) if cache_dtype else None

    def random(*size):
        return torch.randn(*size, device=device).to(dtype)

    return {
        "hidden_states": random(rows, hidden_size),
        "hidden_norm_weight": random(hidden_size) if norm else None,
        "rms_norm_eps": EPS,
        "kv_weight": random(kv_size, hidden_size) / hidden_size**0.5,
        "kv_bias": random(kv_size) if bias else None,
        "k_norm_weight": random(num_layers, head_dim) if norm else None,
        "cos_sin_cache": make_rope(head_dim if rotary_dim is None else rotary_dim, device),
        "is_neox": is_neox,
        "positions": torch.randint(MAX_POSITIONS, (rows,), device=device),
        "slot_mappings": [slots],
        "layer_groups": [0] * num_layers,
        "value_scale": value_scale,
        "k_scales": scales,
        "v_scales": None if scales is None else scales + 0.01,
        "key_caches": [make_cache(*shape) for _ in range(num_layers)],
        "value_caches": [make_cache(*shape) for _ in range(num_layers)],
    }


def check(arguments):
    expected = dict(arguments)
    for name in ("key_caches", "value_caches"):
        expected[name] = [cache.clone() for cache in arguments[name]]
    precompute_context_kv_reference(**expected)
    precompute_context_kv(**arguments)
    for name in ("key_caches", "value_caches"):
        for layer, group in enumerate(arguments["layer_groups"]):
            slots = arguments["slot_mappings"][group]
            assert_cache_close(arguments[name][layer], expected[name][layer], slots)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    "rows,num_layers,num_kv_heads", [(1, 5, 3), (3, 1, 1), (17, 2, 8), (129, 3, 2)]
)
def test_equals_reference(device, dtype, is_neox, head_dim, rows, num_layers, num_kv_heads):
    check(make(rows, num_layers, num_kv_heads, head_dim, dtype, device, is_neox=is_neox))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 128])
@pytest.mark.parametrize("head_dim,hidden_size", [(64, 576), (128, 4096)])
def test_few_rows_of_a_real_drafter(dtype, rows, head_dim, hidden_size):
    for options in ({}, {"bias": True, "cache_dtype": FP8, "layout": "HND"}, {"kv_block_size": 1}):
        check(make(rows, 5, 8, head_dim, dtype, "cuda", hidden_size=hidden_size, **options))


@pytest.mark.gpu
def test_few_rows_in_a_graph_read_what_was_just_written():
    """Rows, positions and slots are written right before, 10 times in a graph, replayed with others."""
    case = make(16, 5, 8, 128, torch.bfloat16, "cuda", hidden_size=1024)
    source, rows = torch.zeros_like(case["hidden_states"]), case["hidden_states"]
    slots, own_slots = case["slot_mappings"][0].clone(), case["slot_mappings"][0]
    shift = torch.zeros(1, dtype=torch.int64, device="cuda")
    caches = [case["key_caches"], case["value_caches"]]
    kept = [[[torch.empty_like(c) for c in kind] for kind in caches] for _ in range(10)]

    def one(i, arguments):
        precompute_context_kv(**arguments)
        for kind, copies in zip(caches, kept[i], strict=True):
            for cache, copy in zip(kind, copies, strict=True):
                copy.copy_(cache)

    def chain():
        for i in range(10):
            torch.mul(source, 1.0 + i, out=rows)
            torch.add(shift, torch.arange(16, device="cuda") + i, out=case["positions"])
            own_slots.copy_(slots.roll(i))
            one(i, case)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for replay in range(3):
        source.copy_(torch.randn_like(source))
        shift.fill_(10 * replay)
        for cache in caches[0] + caches[1]:
            cache.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [[[c.clone() for c in kind] for kind in copies] for copies in kept]
        for cache in caches[0] + caches[1]:
            cache.fill_(POISON)
        for i in range(10):
            positions = shift + torch.arange(16, device="cuda") + i
            alone = {"hidden_states": source * (1.0 + i), "positions": positions}
            torch.cuda.synchronize()
            one(i, case | alone | {"slot_mappings": [slots.roll(i)]})
            torch.cuda.synchronize()
        for a, e in zip(replayed, kept, strict=True):
            for kind, expected in zip(a, e, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(kind, expected, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim,rotary_dim", [(6, 4), (80, 20), (128, 64)])
def test_bias_partial_rotary_value_scale_and_no_norms(device, dtype, head_dim, rotary_dim):
    for options in ({"bias": True}, {"bias": True, "norm": False}, {"value_scale": 0.25}):
        for is_neox in (True, False):
            arguments = make(5, 2, 2, head_dim, dtype, device, rotary_dim=rotary_dim, **options)
            check({**arguments, "is_neox": is_neox})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("kv_block_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND", "KV"])
def test_cache_layouts(device, cache_dtype, kv_block_size, layout):
    for dtype in DTYPES:
        options = {"kv_block_size": kv_block_size, "layout": layout, "cache_dtype": cache_dtype}
        check(make(17, 3, 2, 64, dtype, device, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_groups_strides_and_block_sizes_of_each_layer(device):
    arguments = make(11, 3, device=device)
    slots, num_blocks = make_slots(11, 4, device, skip_every=3)
    arguments["slot_mappings"].append(slots)
    arguments["layer_groups"] = [0, 1, 0]
    for name, layout in (("key_caches", "HND"), ("value_caches", "KV")):
        arguments[name][1] = make_cache(num_blocks, 4, 2, 64, torch.float32, device, layout)
    check(arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_layers", [1, 64])
def test_as_many_layers_as_a_call_takes(device, num_layers):
    check(make(2, num_layers, 1, 16, device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_strided_and_unaligned_hidden_states(device):
    for dtype in DTYPES:
        arguments = make(5, dtype=dtype, device=device)
        wide = torch.randn(5, 200, device=device).to(dtype)
        for offset in (0, 1, 8):
            for name in ("key_caches", "value_caches"):
                for cache in arguments[name]:
                    cache.fill_(POISON)
            check({**arguments, "hidden_states": wide[:, offset : offset + 96]})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rejected_rows_write_nothing_whatever_they_hold(device, dtype):
    arguments = make(8, dtype=dtype, device=device)
    rejected = arguments["slot_mappings"][0] < 0
    arguments["hidden_states"][rejected] = float("nan")
    arguments["positions"][rejected] = 0
    precompute_context_kv(**arguments)
    for cache in arguments["key_caches"] + arguments["value_caches"]:
        assert cache.isfinite().all() and (cache[0] == POISON).all()
    arguments["slot_mappings"][0].fill_(-1)
    for cache in arguments["key_caches"] + arguments["value_caches"]:
        cache.fill_(POISON)
    precompute_context_kv(**arguments)
    for cache in arguments["key_caches"] + arguments["value_caches"]:
        assert (cache == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    precompute_context_kv(**make(0, device=device))


def test_hidden_norm_is_rounded_before_the_gemm():
    # bfloat16(1 + 2^-9) is 1: an unrounded norm would show in a sum of 512 of them.
    arguments = make(1, 1, 1, 2, torch.bfloat16, hidden_size=512, norm=False)
    arguments["hidden_states"] = torch.ones(1, 512, dtype=torch.bfloat16)
    arguments["hidden_norm_weight"] = torch.ones(512, dtype=torch.bfloat16)
    arguments["rms_norm_eps"] = 1 / (1 + 2**-9) ** 2 - 1
    arguments["kv_weight"] = torch.ones(4, 512, dtype=torch.bfloat16)
    arguments["slot_mappings"] = [torch.tensor([17])]
    precompute_context_kv(**arguments)
    assert (arguments["value_caches"][0][1, 1] == 512).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_cpu_twin(dtype):
    on_cpu = make(65, 5, 8, 128, dtype, hidden_size=1024)

    def move(value):
        if isinstance(value, list):
            return [move(v) for v in value]
        return value.cuda() if isinstance(value, torch.Tensor) else value

    on_gpu = {name: move(value) for name, value in on_cpu.items()}
    precompute_context_kv(**on_gpu)
    precompute_context_kv(**on_cpu)
    for name in ("key_caches", "value_caches"):
        for actual, expected in zip(on_gpu[name], on_cpu[name], strict=True):
            assert_cache_close(actual, expected, on_cpu["slot_mappings"][0])


CACHE = torch.zeros(3, 16, 2, 64)


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"kv_weight": torch.zeros(500, 96)},
            r"kv_weight: expected 2 layers \* 2 \* 2 heads \* head_dim 64 = 512 rows of 96 "
            r"columns, got \[500, 96\]",
        ),
        ({"kv_weight": torch.zeros(512, 96).half()}, "kv_weight: expected float32, got float16"),
        ({"kv_bias": torch.zeros(500)}, r"kv_bias: expected shape \[512\], got \[500\]"),
        (
            {"k_norm_weight": torch.zeros(64)},
            r"k_norm_weight: expected shape \[2, 64\], got \[64\]",
        ),
        ({"k_norm_weight": torch.zeros(2, 80)[:, :64]}, "k_norm_weight: must be contiguous"),
        ({"hidden_norm_weight": torch.zeros(95)}, r"hidden_norm_weight: expected shape \[96\]"),
        (
            {"hidden_states": torch.zeros(96)},
            r"hidden_states: expected shape \[\*, \*\], got \[96\]",
        ),
        ({"key_caches": []}, "key_caches: expected 1 to 64 layers a call, got 0"),
        ({"key_caches": [CACHE] * 65}, "key_caches: expected 1 to 64 layers a call, got 65"),
        ({"value_caches": [CACHE]}, "value_caches: expected 2 layers like key_caches, got 1"),
        ({"layer_groups": [0]}, "layer_groups: expected one group for each of 2 layers, got 1"),
        (
            {"layer_groups": [0, 1]},
            "layer_groups: layer 1 names group 1, but there are 1 slot_mappings",
        ),
        (
            {"slot_mappings": [torch.zeros(2).long()]},
            r"slot_mappings\[0\]: expected shape \[3\], got \[2\]",
        ),
        ({"slot_mappings": [torch.tensor([1, 2, 48])]}, r"slot_mappings\[0\]: row 2 names slot 48"),
        ({"positions": torch.tensor([0, -1, 1])}, "positions: row 1 is at -1"),
        (
            {"key_caches": [CACHE, CACHE.half()]},
            r"key_caches\[1\]: expected float32 or float8_e4m3fn",
        ),
        (
            {"key_caches": [CACHE, CACHE[:, :, :1]]},
            r"value_caches\[1\]: expected shape \[3, 16, 1, 64\]",
        ),
        ({"v_scales": torch.ones(2)}, "v_scales: only a float8_e4m3fn cache is scaled"),
    ],
)
def test_messages_name_the_tensor(change, message):
    with pytest.raises(RuntimeError, match=message):
        precompute_context_kv(**{**make(), **change})


def test_opcheck():
    arguments = make(3, bias=True)
    check_op(torch.ops.dflash.precompute_context_kv.default, tuple(arguments.values()))
