// SPDX-License-Identifier: Apache-2.0
// Per-head RMSNorm of q and k, RoPE, q to query, K and V to the paged cache. A group of 8, 16 or 32
// lanes owns some heads of one row, of which the next is read while one is normed; neighbouring
// groups own neighbouring heads, so that a CTA reads qkv in runs. Bytes moved: 2 * num_rows *
// (num_heads + 2 * num_kv_heads) * head_dim * sizeof(T), 16 a lane where all is aligned.
#include "qk_norm_rope_store.h"

#include "common/device.h"
#include "common/head.h"
#include "common/overlap.h"

namespace dflash {
namespace {

constexpr int kThreads = 128;

__device__ __forceinline__ float scale_of(const float* scale) {
  return scale == nullptr ? 1.0f : *scale;
}

template <typename T>
__device__ __forceinline__ Head<T> head_of(const QkNormRopeStoreParams& p, int64_t row, int head) {
  const void* weight = head < p.num_heads                     ? p.q_norm_weight
                       : head < p.num_heads + p.num_kv_heads ? p.k_norm_weight
                                                             : nullptr;
  const T* x = static_cast<const T*>(p.qkv) + row * p.qkv_stride + head * p.head_dim;
  return {x, nullptr, static_cast<const T*>(weight), p.head_dim, p.eps};
}

template <typename T, typename Cache, int kN, int kLanes>
__global__ void __launch_bounds__(kThreads)
    qk_norm_rope_store_kernel(const __grid_constant__ QkNormRopeStoreParams p,
                              unsigned groups_per_row) {
  extern __shared__ float4 shared[];
  // NOTE: attention may not start before the end: its CTAs would crowd the SMs that are free early.
  wait_for_predecessor();
  constexpr unsigned kGroups = kThreads / kLanes;
  const unsigned item = blockIdx.x * kGroups + threadIdx.x / kLanes;
  const int64_t row = item / groups_per_row;
  if (row >= p.num_rows) return;
  float* scratch = reinterpret_cast<float*>(shared) + threadIdx.x / kLanes * p.head_dim;
  const int heads_per_row = p.num_heads + 2 * p.num_kv_heads;

  int head = static_cast<int>(item % groups_per_row);
  Vec<T, kN> x = load_first<kN, kLanes>(head_of<T>(p, row, head));
  const int64_t slot = p.slot_mapping[row];
  const float* cos_sin = p.rope.cos_sin + p.positions[row] * p.rope.stride;
  const int first = threadIdx.x % kLanes * kN;
  const Angles<kN> angles = load_angles<kN>(p.rope, cos_sin, first);
  const auto angles_of = [&](int i) {
    return i == first ? angles : load_angles<kN>(p.rope, cos_sin, i);
  };
  while (head < heads_per_row) {
    const Head<T> h = head_of<T>(p, row, head);
    const int next = head + static_cast<int>(groups_per_row);
    Vec<T, kN> next_x;
    if (next < heads_per_row) next_x = load_first<kN, kLanes>(head_of<T>(p, row, next));
    const int kv_head = head - p.num_heads, value_head = kv_head - p.num_kv_heads;
    if (value_head < 0) {
      T* query = static_cast<T*>(p.query) + row * p.query_row_stride + head * p.query_head_stride;
      norm_rope<kN, kLanes>(h, x, p.rope, scratch, angles_of, [&](int i, const float* y) {
        if (kv_head < 0) return store_head<kN>(y, 1.0f, query + i);
        if (slot < 0) return;
        Cache* key = cache_head<Cache>(p.key_cache, p.kv_block_size, slot, kv_head);
        store_head<kN>(y, scale_of(p.k_scale), key + i);
      });
    } else if (slot >= 0) {
      Cache* value = cache_head<Cache>(p.value_cache, p.kv_block_size, slot, value_head);
      scale_store<kN, kLanes>(h, x, p.value_scale, scale_of(p.v_scale), value);
    }
    __syncwarp(lane_group_mask<kLanes>());  // scratch is read
    x = next_x;
    head = next;
  }
}

// With many rows a group takes several heads: their row is looked up once, and all CTAs fit.
constexpr int64_t kMaxHeads = 6;
constexpr int64_t kCtasPerSm = 6;

template <typename T, typename Cache, int kN, int kLanes>
cudaError_t launch_with(const QkNormRopeStoreParams& p, cudaStream_t stream) {
  constexpr int kGroups = kThreads / kLanes;
  const int64_t heads_per_row = p.num_heads + 2 * p.num_kv_heads;
  const int64_t slots = kCtasPerSm * kGroups * device_properties().num_sms;
  const int64_t wanted = (p.num_rows * heads_per_row + slots - 1) / slots;
  const int64_t heads = wanted < kMaxHeads ? wanted : kMaxHeads;
  const int64_t groups_per_row = (heads_per_row + heads - 1) / heads;
  const int64_t items = p.num_rows * groups_per_row;
  if (items > INT32_MAX) return cudaErrorInvalidConfiguration;
  const unsigned grid = static_cast<unsigned>((items + kGroups - 1) / kGroups);
  const size_t shared_bytes = sizeof(float) * kGroups * p.head_dim;
  return launch_overlapped(qk_norm_rope_store_kernel<T, Cache, kN, kLanes>, grid, kThreads,
                           shared_bytes, stream, p, static_cast<unsigned>(groups_per_row));
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
