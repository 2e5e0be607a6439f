// SPDX-License-Identifier: Apache-2.0
#include "kernels/precompute_context_kv.h"

#include "head.h"

namespace dflash::cpu {
namespace {

template <typename scalar_t, typename cache_t>
DFLASH_INLINE void layer_row(const PrecomputeContextKvParams& p, int l, int64_t r) {
  const ContextLayer& layer = p.layers[l];
  const int64_t slot = layer.slot_mapping[r];
  if (slot < 0) return;
  const int64_t layer_size = 2 * static_cast<int64_t>(p.num_kv_heads) * p.head_dim;
  const scalar_t* kv = static_cast<const scalar_t*>(p.kv) + (r * p.num_layers + l) * layer_size;
  const scalar_t* bias = static_cast<const scalar_t*>(p.kv_bias);
  if (bias != nullptr) bias += l * layer_size;
  const scalar_t* weight = static_cast<const scalar_t*>(p.k_norm_weight);
  if (weight != nullptr) weight += static_cast<int64_t>(l) * p.head_dim;
  const float k_scale = p.k_scales == nullptr ? 1.0f : p.k_scales[l];
  const float v_scale = p.v_scales == nullptr ? 1.0f : p.v_scales[l];

  float x[kMaxHeadDim];
  for (int head = 0; head < p.num_kv_heads; ++head) {
    const int64_t k = static_cast<int64_t>(head) * p.head_dim;
    const int64_t v = k + layer_size / 2;
    load_head<scalar_t>(kv + k, bias == nullptr ? nullptr : bias + k, p.head_dim, x);
    norm_head(x, weight, p.head_dim, p.eps);
    rotate_head(x, p.rope, p.positions[r]);
    store_head(x, p.head_dim, k_scale,
               cache_head<cache_t>(layer.key_cache, layer.kv_block_size, slot, head));
    load_head<scalar_t>(kv + v, bias == nullptr ? nullptr : bias + v, p.head_dim, x);
    for (int i = 0; i < p.head_dim; ++i) x[i] *= p.value_scale;
    store_head(x, p.head_dim, v_scale,
               cache_head<cache_t>(layer.value_cache, layer.kv_block_size, slot, head));
  }
}

template <typename scalar_t, typename cache_t>
DFLASH_INLINE void row(const PrecomputeContextKvParams& p, int64_t r) {
  for (int l = 0; l < p.num_layers; ++l) layer_row<scalar_t, cache_t>(p, l, r);
}

DFLASH_CPU_CLONES void rows(const PrecomputeContextKvParams& p, int64_t begin, int64_t end) {
  DFLASH_DISPATCH_CACHE(p.dtype, p.cache_dtype,
                        for (int64_t r = begin; r < end; ++r) row<scalar_t, cache_t>(p, r));
}

}  // namespace

void precompute_context_kv(const PrecomputeContextKvParams& params) {
  const int64_t row_size = int64_t{2} * params.num_layers * params.num_kv_heads * params.head_dim;
  parallel_for(params.num_rows, 1 + 16384 / row_size,
               [&](int64_t begin, int64_t end) { rows(params, begin, end); });
}

}  // namespace dflash::cpu
