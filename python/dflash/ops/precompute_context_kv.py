# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch

from dflash.ops.add_rms_norm import add_rms_norm_reference
from dflash.ops.qk_norm_rope_store import norm_rope_reference, store_reference


def precompute_context_kv(
    hidden_states: torch.Tensor,
    hidden_norm_weight: torch.Tensor | None,
    rms_norm_eps: float,
    kv_weight: torch.Tensor,
    kv_bias: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    positions: torch.Tensor,
    slot_mappings: list[torch.Tensor],
    layer_groups: list[int],
    value_scale: float,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    key_caches: list[torch.Tensor],
    value_caches: list[torch.Tensor],
) -> None:
    """K and V of every draft layer for context rows, from the un-normed output of fc.

    c = hidden_norm(hidden_states), rounded; [k, v] of all layers = kv_weight c (+ kv_bias);
    K = RoPE(k_norm(k)) at the row's position, V = v * value_scale, in fp32 from the GEMM's rounded
    output, rounded once more at the store into slot slot_mappings[layer_groups[l]][t].

    Args:
        hidden_states: [T, H] float32, float16 or bfloat16, any row stride.
        hidden_norm_weight: [H], or None: not normed.
        rms_norm_eps: of hidden_norm and k_norm.
        kv_weight: [L * 2 * Hk * D, H]: layer by layer, K before V.
        kv_bias: [L * 2 * Hk * D] or None.
        k_norm_weight: [L, D] contiguous, or None: K is not normed (Llama).
        cos_sin_cache: [max_positions, rotary_dim] float32, cosines then sines; rotary_dim <= D.
        is_neox: halves (True) or neighbouring pairs (False) rotate together.
        positions: [T] int64, each below max_positions (checked on a CPU only).
        slot_mappings: one [T] int64 per K/V group; -1: the row is not stored in its layers.
        layer_groups: for each layer the index of its slot mapping.
        value_scale: multiplies V.
        k_scales: [L] float32 or None, only with float8_e4m3fn caches, which store k / k_scales[l].
        v_scales: the same for V.
        key_caches: L tensors [num_blocks, kv_block_size, Hk, D] of hidden_states' dtype or
            float8_e4m3fn; each has its own strides (contiguous last dimension) and kv_block_size.
            Hk, D and the dtype are one for all. 1 to 64 layers.
        value_caches: L tensors, each of its key cache's shape, with strides of its own.

    Weights have hidden_states' dtype.

    Raises:
        RuntimeError: a tensor has another shape, dtype, device or last stride, or, on a CPU, a
            position or slot is out of range; the message names it.
    """
    torch.ops.dflash.precompute_context_kv(
        hidden_states,
        hidden_norm_weight,
        rms_norm_eps,
        kv_weight,
        kv_bias,
        k_norm_weight,
        cos_sin_cache,
        is_neox,
        positions,
        slot_mappings,
        layer_groups,
        value_scale,
        k_scales,
        v_scales,
        key_caches,
        value_caches,
    )


@torch.library.register_fake("dflash::precompute_context_kv")
def _(
    hidden_states,
    hidden_norm_weight,
    rms_norm_eps,
    kv_weight,
    kv_bias,
    k_norm_weight,
    cos_sin_cache,
    is_neox,
    positions,
    slot_mappings,
    layer_groups,
    value_scale,
    k_scales,
    v_scales,
    key_caches,
    value_caches,
) -> None:
    return None


def precompute_context_kv_reference(
    hidden_states: torch.Tensor,
    hidden_norm_weight: torch.Tensor | None,
    rms_norm_eps: float,
    kv_weight: torch.Tensor,
    kv_bias: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    positions: torch.Tensor,
    slot_mappings: list[torch.Tensor],
    layer_groups: list[int],
    value_scale: float,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    key_caches: list[torch.Tensor],
    value_caches: list[torch.Tensor],
) -> None:
    """The same in plain torch, layer by layer, in fp32 between the roundings; never serves."""
    dtype = hidden_states.dtype
    num_layers = len(key_caches)
    num_kv_heads, head_dim = key_caches[0].shape[2:]
    context = hidden_states
    if hidden_norm_weight is not None:
        context, _ = add_rms_norm_reference(None, hidden_states, hidden_norm_weight, rms_norm_eps)
    weights = kv_weight.float().unflatten(0, (num_layers, 2, num_kv_heads * head_dim))
    for layer, group in enumerate(layer_groups):
        k, v = ((context.float() @ weights[layer, part].T).to(dtype).float() for part in range(2))
        if kv_bias is not None:
            bias = kv_bias.float().view(num_layers, 2, -1)[layer]
            k, v = k + bias[0], v + bias[1]
        norm_weight = None if k_norm_weight is None else k_norm_weight[layer]
        key = norm_rope_reference(
            k.unflatten(1, (num_kv_heads, head_dim)),
            norm_weight,
            rms_norm_eps,
            cos_sin_cache[positions],
            is_neox,
        )
        value = v.unflatten(1, (num_kv_heads, head_dim)) * value_scale
        slots = slot_mappings[group]
        store_reference(
            key, None if k_scales is None else k_scales[layer], slots, key_caches[layer]
        )
        store_reference(
            value, None if v_scales is None else v_scales[layer], slots, value_caches[layer]
        )
