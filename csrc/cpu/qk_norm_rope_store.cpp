// SPDX-License-Identifier: Apache-2.0
#include "kernels/qk_norm_rope_store.h"

#include "head.h"

namespace dflash::cpu {
namespace {

template <typename scalar_t>
DFLASH_INLINE void query_row(const QkNormRopeStoreParams& p, int64_t r, const scalar_t* qkv) {
  const scalar_t* weight = static_cast<const scalar_t*>(p.q_norm_weight);
  scalar_t* query = static_cast<scalar_t*>(p.query) + r * p.query_row_stride;
  float x[kMaxHeadDim];
  for (int head = 0; head < p.num_heads; ++head) {
    load_head<scalar_t>(qkv + head * p.head_dim, nullptr, p.head_dim, x);
    norm_head(x, weight, p.head_dim, p.eps);
    rotate_head(x, p.rope, p.positions[r]);
    store_head(x, p.head_dim, 1.0f, query + head * p.query_head_stride);
  }
}

template <typename scalar_t, typename cache_t>
DFLASH_INLINE void store_row(const QkNormRopeStoreParams& p, int64_t r, const scalar_t* kv) {
  const int64_t slot = p.slot_mapping[r];
  if (slot < 0) return;
  const scalar_t* weight = static_cast<const scalar_t*>(p.k_norm_weight);
  const float k_scale = p.k_scale == nullptr ? 1.0f : *p.k_scale;
  const float v_scale = p.v_scale == nullptr ? 1.0f : *p.v_scale;
  float x[kMaxHeadDim];
  for (int head = 0; head < p.num_kv_heads; ++head) {
    load_head<scalar_t>(kv + head * p.head_dim, nullptr, p.head_dim, x);
    norm_head(x, weight, p.head_dim, p.eps);
    rotate_head(x, p.rope, p.positions[r]);
    store_head(x, p.head_dim, k_scale,
               cache_head<cache_t>(p.key_cache, p.kv_block_size, slot, head));
    load_head<scalar_t>(kv + (p.num_kv_heads + head) * p.head_dim, nullptr, p.head_dim, x);
    for (int i = 0; i < p.head_dim; ++i) x[i] *= p.value_scale;
    store_head(x, p.head_dim, v_scale,
               cache_head<cache_t>(p.value_cache, p.kv_block_size, slot, head));
  }
}

template <typename scalar_t, typename cache_t>
DFLASH_INLINE void row(const QkNormRopeStoreParams& p, int64_t r) {
  const scalar_t* qkv = static_cast<const scalar_t*>(p.qkv) + r * p.qkv_stride;
  query_row<scalar_t>(p, r, qkv);
  store_row<scalar_t, cache_t>(p, r, qkv + static_cast<int64_t>(p.num_heads) * p.head_dim);
}

DFLASH_CPU_CLONES void rows(const QkNormRopeStoreParams& p, int64_t begin, int64_t end) {
  DFLASH_DISPATCH_CACHE(p.dtype, p.cache_dtype,
                        for (int64_t r = begin; r < end; ++r) row<scalar_t, cache_t>(p, r));
}

}  // namespace

void qk_norm_rope_store(const QkNormRopeStoreParams& params) {
  const int64_t row_size = (params.num_heads + 2 * params.num_kv_heads) * params.head_dim;
  parallel_for(params.num_rows, 1 + 16384 / row_size,
               [&](int64_t begin, int64_t end) { rows(params, begin, end); });
}

}  // namespace dflash::cpu
