// SPDX-License-Identifier: Apache-2.0
// Where a slot of a paged cache lies, and the RoPE table: plain data for kernels and CPU twins.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace dflash {

// [num_blocks, kv_block_size, num_kv_heads, D], strides in elements over a contiguous last
// dimension.
struct KvCache {
  void* data;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
};

template <typename T>
DFLASH_HOST_DEVICE T* cache_head(const KvCache& cache, int64_t kv_block_size, int64_t slot,
                                 int64_t head) {
  const int64_t block = slot / kv_block_size;
  const int64_t token = slot - block * kv_block_size;
  return static_cast<T*>(cache.data) + block * cache.block_stride + token * cache.token_stride +
         head * cache.head_stride;
}

// [max_positions, rotary_dim]: cosines in the first half of a row, sines in the second. Elements
// past rotary_dim of a head are not rotated.
struct RopeTable {
  const float* cos_sin;
  int64_t stride;
  int rotary_dim;
  bool is_neox;
};

// Heads wider than this are refused: the twins keep one on the stack, the kernels in shared memory.
inline constexpr int kMaxHeadDim = 1024;

// An fp8 cache holds x / scale; any other holds x.
template <typename T>
DFLASH_HOST_DEVICE T to_cache(float x, float scale) {
  if constexpr (sizeof(T) == 1) return from_float<T>(x / scale);
  return from_float<T>(x);
}

}  // namespace dflash

// Runs the body with `scalar_t` bound to the model's storage type and `cache_t` to the cache's: fp8
// or the same.
#define DFLASH_DISPATCH_CACHE(dtype, cache_dtype, ...)     \
  DFLASH_DISPATCH_FLOATING(                                \
      dtype,                                               \
      if ((cache_dtype) == ::dflash::DType::kFloat8E4M3) { \
        using cache_t = ::dflash::Float8E4M3;              \
        __VA_ARGS__;                                       \
      } else {                                             \
        using cache_t = scalar_t;                          \
        __VA_ARGS__;                                       \
      })
