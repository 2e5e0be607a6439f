# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from dflash.ops.qk_norm_rope_store import qk_norm_rope_store, qk_norm_rope_store_reference

from .kv_support import (
    FP8,
    MAX_POSITIONS,
    POISON,
    assert_cache_close,
    make_cache,
    make_rope,
    make_slots,
)
from .support import DEVICES, DTYPES, assert_close, check_op, guarded

EPS = 1e-6


def make(
    rows=3,
    heads=(4, 2),
    head_dim=64,
    dtype=torch.float32,
    device="cpu",
    *,
    kv_block_size=16,
    layout="NHD",
    cache_dtype=None,
    rotary_dim=None,
    is_neox=True,
    norm=True,
    value_scale=1.0,
):
    """The op's arguments by name."""
    num_heads, num_kv_heads = heads
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
    scales = [torch.tensor([s], device=device) if cache_dtype else None for s in (0.03, 0.05)]
    weights = torch.rand(2, head_dim, device=device).add(0.5).to(dtype) if norm else (None, None)
    return {
        "qkv": torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim, device=device).to(
            dtype
        ),
        "q_norm_weight": weights[0],
        "k_norm_weight": weights[1],
        "rms_norm_eps": EPS,
        "cos_sin_cache": make_rope(head_dim if rotary_dim is None else rotary_dim, device),
        "is_neox": is_neox,
        "positions": torch.randint(MAX_POSITIONS, (rows,), device=device),
        "slot_mapping": slots,
        "value_scale": value_scale,
        "k_scale": scales[0],
        "v_scale": scales[1],
        "query": None,
        "key_cache": make_cache(*shape),
        "value_cache": make_cache(*shape),
    }


def check(arguments):
    expected = dict(arguments)
    expected.pop("query")
    for name in ("key_cache", "value_cache"):
        expected[name] = arguments[name].clone()
    expected_query = qk_norm_rope_store_reference(**expected)
    query = qk_norm_rope_store(**arguments)
    assert_close(query, expected_query)
    for name in ("key_cache", "value_cache"):
        assert_cache_close(arguments[name], expected[name], arguments["slot_mapping"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rows,heads", [(1, (9, 3)), (3, (8, 1)), (17, (5, 5)), (129, (8, 2))])
def test_equals_reference(device, dtype, is_neox, head_dim, rows, heads):
    check(make(rows, heads, head_dim, dtype, device, is_neox=is_neox))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    "head_dim,rotary_dim", [(2, 2), (6, 4), (80, 20), (128, 0), (128, 32), (320, 64)]
)
def test_partial_rotary_and_unusual_head_dims(device, dtype, is_neox, head_dim, rotary_dim):
    check(make(5, (4, 2), head_dim, dtype, device, rotary_dim=rotary_dim, is_neox=is_neox))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize("kv_block_size", [1, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND", "KV"])
def test_cache_layouts(device, cache_dtype, kv_block_size, layout):
    for dtype in DTYPES:
        check(
            make(
                17,
                (6, 2),
                64,
                dtype,
                device,
                kv_block_size=kv_block_size,
                layout=layout,
                cache_dtype=cache_dtype,
                value_scale=0.5,
            )
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [(False, False), (True, False), (False, True)])
def test_norms_are_optional(device, weights):
    arguments = make(7, device=device)
    for name, given in zip(("q_norm_weight", "k_norm_weight"), weights, strict=True):
        arguments[name] = arguments[name] if given else None
    check(arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_without_scales_and_beyond_its_range(device):
    arguments = make(9, device=device, cache_dtype=FP8, value_scale=1000.0)
    arguments["k_scale"] = arguments["v_scale"] = None
    check(arguments)
    stored = arguments["value_cache"].float()
    assert stored.isfinite().all() and stored.abs().max() == 448


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_strided_and_unaligned_inputs(device, offset):
    arguments = make(5, (4, 2), 64, torch.float16, device)
    wide = torch.randn(5, 700, device=device).half()
    arguments["qkv"] = wide[:, offset : offset + 512]
    output = torch.full((5, 4, 100), POISON, device=device).half()
    arguments["query"] = output[:, :, offset : offset + 64]
    rope = arguments["cos_sin_cache"]
    arguments["cos_sin_cache"] = torch.cat([rope, rope, rope], dim=1)[:, 64 * (offset > 0) :][
        :, :64
    ]
    check(arguments)
    output[:, :, offset : offset + 64] = POISON
    assert (output == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_guards_and_rows_that_are_not_stored(device, dtype):
    arguments = make(6, (4, 2), 64, dtype, device)
    arguments["slot_mapping"].fill_(-1)
    query, check_query = guarded((6, 4, 64), dtype, device)
    key_cache, check_key = guarded((3, 16, 2, 64), dtype, device)
    before = key_cache.clone()
    check({**arguments, "query": query})
    qk_norm_rope_store(**{**arguments, "query": query, "key_cache": key_cache})
    check_query()
    check_key()
    torch.testing.assert_close(key_cache, before, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_last_slot_and_block_edges(device):
    arguments = make(4, device=device)
    last = arguments["key_cache"].shape[0] * 16 - 1
    arguments["slot_mapping"] = torch.tensor([15, 16, 31, last], device=device)
    check(arguments)
    assert (arguments["key_cache"][0, :15].float() == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
def test_empty(device):
    arguments = make(0, device=device)
    assert qk_norm_rope_store(**arguments).shape == (0, 4, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_equals_cpu_twin(dtype):
    on_cpu = make(65, (32, 8), 128, dtype)
    on_gpu = {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in on_cpu.items()}
    assert_close(qk_norm_rope_store(**on_gpu), qk_norm_rope_store(**on_cpu))
    for name in ("key_cache", "value_cache"):
        assert_cache_close(on_gpu[name], on_cpu[name], on_cpu["slot_mapping"])


@pytest.mark.parametrize(
    "change,message",
    [
        (
            {"qkv": torch.zeros(3, 500), "query": torch.zeros(3, 4, 64)},
            r"qkv: expected \(4 \+ 2 \* 2\) \* 64 = 512 columns, got 500",
        ),
        (
            {"query": torch.zeros(3, 4, 32)},
            r"query: expected shape \[3, \*, 64\], got \[3, 4, 32\]",
        ),
        ({"q_norm_weight": torch.zeros(63)}, r"q_norm_weight: expected shape \[64\], got \[63\]"),
        ({"k_norm_weight": torch.zeros(64).half()}, "k_norm_weight: expected float32, got float16"),
        ({"positions": torch.zeros(3).int()}, "positions: expected int64, got int32"),
        (
            {"positions": torch.tensor([0, 300, 1])},
            "positions: row 1 is at 300, but cos_sin_cache has 300",
        ),
        ({"slot_mapping": torch.zeros(4).long()}, r"slot_mapping: expected shape \[3\], got \[4\]"),
        (
            {"slot_mapping": torch.tensor([0, 1, 999])},
            "slot_mapping: row 2 names slot 999, but the cache has 48",
        ),
        ({"slot_mapping": torch.tensor([0, 1, -2])}, "slot_mapping: row 2 names slot -2"),
        (
            {"k_scale": torch.ones(1)},
            "k_scale: only a float8_e4m3fn cache is scaled, this one is float32",
        ),
        (
            {"cos_sin_cache": torch.zeros(9, 66)},
            r"cos_sin_cache: rotary_dim .* at most head_dim 64, got 66",
        ),
        (
            {"cos_sin_cache": torch.zeros(9, 64).half()},
            "cos_sin_cache: expected float32, got float16",
        ),
        (
            {"key_cache": torch.zeros(3, 16, 2, 64).half()},
            "key_cache: expected float32 or float8_e4m3fn, got float16",
        ),
        (
            {"key_cache": torch.zeros(3, 16, 2, 65)},
            "key_cache: head_dim must be even and at most 1024, got 65",
        ),
        (
            {"value_cache": torch.zeros(3, 16, 1, 64)},
            r"value_cache: expected shape \[3, 16, 2, 64\]",
        ),
        (
            {"value_cache": torch.zeros(3, 16, 64, 2).mT},
            "value_cache: the last dimension must be contiguous",
        ),
    ],
)
def test_messages_name_the_tensor(change, message):
    with pytest.raises(RuntimeError, match=message):
        qk_norm_rope_store(**{**make(), **change})


def test_opcheck():
    arguments = make(3, value_scale=2.0)
    arguments["query"] = torch.empty(3, 4, 64)
    check_op(torch.ops.dflash.qk_norm_rope_store.default, tuple(arguments.values()))
