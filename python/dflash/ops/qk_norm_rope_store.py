# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    value_scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    query: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """Per-head RMSNorm of q and k, RoPE, q to `query`, K and V to the paged cache, in one pass.

    q = RoPE(norm(q)), k = RoPE(norm(k)), v = v * value_scale, in fp32 with one rounding at the
    store. Row t goes to slot slot_mapping[t] = block * kv_block_size + offset.

    Args:
        qkv: [T, (Hq + 2 * Hk) * D] float32, float16 or bfloat16: q, k, v. Any row stride.
        q_norm_weight: [D], or None: q is not normed (Llama).
        k_norm_weight: [D], or None.
        rms_norm_eps: added to the mean square.
        cos_sin_cache: [max_positions, rotary_dim] float32, cosines then sines. rotary_dim <= D: the
            elements past it are not rotated.
        is_neox: True rotates the halves [0, rotary_dim / 2) and [rotary_dim / 2, rotary_dim); False
            rotates neighbouring pairs.
        positions: [T] int64, each below max_positions (checked on a CPU only).
        slot_mapping: [T] int64; -1: K and V of the row are not stored, its query is still written.
        value_scale: multiplies V.
        k_scale: [1] float32 or None, only with a float8_e4m3fn cache, which stores k / k_scale.
        v_scale: the same for V.
        query: [T, Hq, D] of qkv's dtype with any strides over a contiguous last dimension, or None:
            allocated.
        key_cache: [num_blocks, kv_block_size, Hk, D] of qkv's dtype or float8_e4m3fn, with any
            strides over a contiguous last dimension. D is even and at most 1024.
        value_cache: like key_cache, with strides of its own.

    Returns:
        query.

    Raises:
        RuntimeError: a tensor has another shape, dtype, device or last stride, or, on a CPU, a
            position or slot is out of range; the message names it.
    """
    if query is None:
        num_kv_heads, head_dim = key_cache.shape[2:]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        query = qkv.new_empty(qkv.shape[0], max(num_heads, 0), head_dim)
    torch.ops.dflash.qk_norm_rope_store(
        qkv,
        q_norm_weight,
        k_norm_weight,
        rms_norm_eps,
        cos_sin_cache,
        is_neox,
        positions,
        slot_mapping,
        value_scale,
        k_scale,
        v_scale,
        query,
        key_cache,
        value_cache,
    )
    return query


@torch.library.register_fake("dflash::qk_norm_rope_store")
def _(
    qkv,
    q_norm_weight,
    k_norm_weight,
    rms_norm_eps,
    cos_sin_cache,
    is_neox,
    positions,
    slot_mapping,
    value_scale,
    k_scale,
    v_scale,
    query,
    key_cache,
    value_cache,
) -> None:
    return None


def norm_rope_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    is_neox: bool,
) -> torch.Tensor:
    """RoPE(norm(x)) of [T, heads, D] in fp32, by complex products; cos_sin is [T, rotary_dim]."""
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.float()
    rotary_dim = cos_sin.shape[1]
    if rotary_dim == 0:
        return x
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    # (re, im) in the last dimension: halves for neox, neighbours for interleaved.
    halves, neighbours = rotated.unflatten(-1, (2, -1)), rotated.unflatten(-1, (-1, 2))
    pairs = halves.transpose(-1, -2) if is_neox else neighbours
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)
    pairs = torch.view_as_real(turned)
    rotated = (pairs.transpose(-1, -2) if is_neox else pairs).flatten(-2)
    return torch.cat([rotated, rest], dim=-1)


def store_reference(
    x: torch.Tensor, scale: torch.Tensor | None, slot_mapping: torch.Tensor, cache: torch.Tensor
) -> None:
    """Rows of x [T, Hk, D] (fp32) to their slots of the cache, rounded once; slot -1 is skipped."""
    if cache.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(cache.dtype).max
        x = (x if scale is None else x / scale).clamp(-limit, limit)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    # Indexed assignment of fp8 is not implemented everywhere: move the bytes.
    if cache.dtype == torch.float8_e4m3fn:
        cache.view(torch.uint8)[blocks, offsets] = x[kept].to(cache.dtype).view(torch.uint8)
    else:
        cache[blocks, offsets] = x[kept].to(cache.dtype)


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    rms_norm_eps: float,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    value_scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> torch.Tensor:
    """The same in plain torch, in fp32; never serves. Writes the caches, returns query."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    heads = qkv.unflatten(1, (-1, head_dim))
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    cos_sin = cos_sin_cache[positions]
    query = norm_rope_reference(q, q_norm_weight, rms_norm_eps, cos_sin, is_neox)
    key = norm_rope_reference(k, k_norm_weight, rms_norm_eps, cos_sin, is_neox)
    store_reference(key, k_scale, slot_mapping, key_cache)
    store_reference(v.float() * value_scale, v_scale, slot_mapping, value_cache)
    return query.to(qkv.dtype)
