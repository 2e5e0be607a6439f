// SPDX-License-Identifier: Apache-2.0
// Per-head RMSNorm of q and k, RoPE, q to query, K and V to the paged cache. A group of 8, 16 or 32
// lanes owns one head of one row; neighbouring groups own neighbouring heads, so that a CTA reads
// qkv in one run. Bytes moved: 2 * num_rows * (num_heads + 2 * num_kv_heads) * head_dim *
// sizeof(T), 16 a lane where all is aligned.
#include "qk_norm_rope_store.h"

#include "common/head.h"
#include "common/overlap.h"

namespace dflash {
namespace {

constexpr int kThreads = 128;

template <typename T, typename Cache, int kN, int kLanes>
__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_store_kernel(const __grid_constant__ QkNormRopeStoreParams p) {
  extern __shared__ float4 shared[];
  wait_for_predecessor();
  let_successor_start();
  constexpr int kGroups = kThreads / kLanes;
  const int group = threadIdx.x / kLanes;
  const int heads_per_row = p.num_heads + 2 * p.num_kv_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kGroups + group;
  const int64_t row = item / heads_per_row;
  if (row >= p.num_rows) return;
  const int head = static_cast<int>(item - row * heads_per_row);
  float* scratch = reinterpret_cast<float*>(shared) + group * p.head_dim;

  const T* x = static_cast<const T*>(p.qkv) + row * p.qkv_stride + head * p.head_dim;
  const int64_t position = p.positions[row], slot = p.slot_mapping[row];
  if (head < p.num_heads) {
    const Head<T> q{x, nullptr, static_cast<const T*>(p.q_norm_weight), p.head_dim, p.eps};
    T* out = static_cast<T*>(p.query) + row * p.query_row_stride + head * p.query_head_stride;
    norm_rope_store<kN, kLanes>(q, p.rope, position, 1.0f, scratch, out);
    return;
  }
  const int kv_head = head - p.num_heads;
  if (kv_head < p.num_kv_heads) {
    const Head<T> k{x, nullptr, static_cast<const T*>(p.k_norm_weight), p.head_dim, p.eps};
    Cache* out =
        slot < 0 ? nullptr : cache_head<Cache>(p.key_cache, p.kv_block_size, slot, kv_head);
    const float scale = p.k_scale == nullptr ? 1.0f : *p.k_scale;
    norm_rope_store<kN, kLanes>(k, p.rope, position, scale, scratch, out);
    return;
  }
  if (slot < 0) return;
  const Head<T> v{x, nullptr, nullptr, p.head_dim, p.eps};
  Cache* out = cache_head<Cache>(p.value_cache, p.kv_block_size, slot, kv_head - p.num_kv_heads);
  scale_store<kN, kLanes>(v, p.value_scale, p.v_scale == nullptr ? 1.0f : *p.v_scale, out);
}

template <typename T, typename Cache, int kN, int kLanes>
cudaError_t launch_with(const QkNormRopeStoreParams& p, cudaStream_t stream) {
  constexpr int kGroups = kThreads / kLanes;
  const int64_t items = p.num_rows * (p.num_heads + 2 * p.num_kv_heads);
  const unsigned grid = static_cast<unsigned>((items + kGroups - 1) / kGroups);
  const size_t shared_bytes = sizeof(float) * kGroups * p.head_dim;
  return launch_overlapped(qk_norm_rope_store_kernel<T, Cache, kN, kLanes>, grid, kThreads,
                           shared_bytes, stream, p);
}

template <typename T, typename Cache>
bool is_vectorizable(const QkNormRopeStoreParams& p) {
  constexpr int kN = kVec<T>;
  return rows_are_vectorizable<T>(p.qkv, p.qkv_stride, p.head_dim) &&
         rows_are_vectorizable<T>(p.query, p.query_row_stride, p.query_head_stride) &&
         is_aligned(p.q_norm_weight, 16) && is_aligned(p.k_norm_weight, 16) &&
         rope_is_vectorizable<kN>(p.rope) && cache_is_vectorizable<kN, Cache>(p.key_cache) &&
         cache_is_vectorizable<kN, Cache>(p.value_cache);
}

template <typename T, typename Cache>
cudaError_t launch(const QkNormRopeStoreParams& p, cudaStream_t stream) {
  if (!is_vectorizable<T, Cache>(p)) return launch_with<T, Cache, 1, 32>(p, stream);
  DFLASH_DISPATCH_LANES(p.head_dim / kVec<T>,
                        return (launch_with<T, Cache, kVec<T>, kLanes>(p, stream)));
}

}  // namespace

cudaError_t launch_qk_norm_rope_store(const QkNormRopeStoreParams& params, cudaStream_t stream) {
  DFLASH_DISPATCH_CACHE(params.dtype, params.cache_dtype,
                        return (launch<scalar_t, cache_t>(params, stream)));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
