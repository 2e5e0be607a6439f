// SPDX-License-Identifier: Apache-2.0
// One head of one layer's K or V of one context row, from the GEMM's rounded output to its slot.
#pragma once

#include "head.h"
#include "kernels/precompute_context_kv.h"

namespace dflash {

// The kLanes lanes of a group; `column` is the head among [layer, K or V, head], `x` its elements,
// read only if the row is stored. `scratch` holds head_dim floats.
template <int kN, int kLanes, typename Cache, typename T>
__device__ __forceinline__ void store_context_head(const PrecomputeContextKvParams& p, int64_t row,
                                                   int column, const T* x, float* scratch) {
  const int head = column % p.num_kv_heads;
  const int l = column / (2 * p.num_kv_heads);
  const bool is_key = column / p.num_kv_heads % 2 == 0;
  const ContextLayer& layer = p.layers[l];
  const int64_t slot = layer.slot_mapping[row], position = p.positions[row];
  if (slot < 0) return;

  const T* bias = static_cast<const T*>(p.kv_bias);
  Head<T> kv{x, bias == nullptr ? nullptr : bias + static_cast<int64_t>(column) * p.head_dim,
             nullptr, p.head_dim, p.eps};
  if (!is_key) {
    Cache* out = cache_head<Cache>(layer.value_cache, layer.kv_block_size, slot, head);
    scale_store<kN, kLanes>(kv, p.value_scale, p.v_scales == nullptr ? 1.0f : p.v_scales[l], out);
    return;
  }
  if (p.k_norm_weight != nullptr) {
    kv.weight = static_cast<const T*>(p.k_norm_weight) + static_cast<int64_t>(l) * p.head_dim;
  }
  const float scale = p.k_scales == nullptr ? 1.0f : p.k_scales[l];
  Cache* out = cache_head<Cache>(layer.key_cache, layer.kv_block_size, slot, head);
  norm_rope_store<kN, kLanes>(kv, p.rope, position, scale, scratch, out);
}

// Whether heads can be moved in 16-byte steps.
template <typename T, typename Cache>
bool context_is_vectorizable(const PrecomputeContextKvParams& p) {
  constexpr int kN = kVec<T>;
  bool caches = true;
  for (int l = 0; l < p.num_layers; ++l) {
    caches = caches && cache_is_vectorizable<kN, Cache>(p.layers[l].key_cache) &&
             cache_is_vectorizable<kN, Cache>(p.layers[l].value_cache);
  }
  return caches && p.head_dim % kN == 0 && is_aligned(p.kv, 16) && is_aligned(p.kv_bias, 16) &&
         is_aligned(p.k_norm_weight, 16) && rope_is_vectorizable<kN>(p.rope);
}

}  // namespace dflash
