// SPDX-License-Identifier: Apache-2.0
// Vocabulary passes on the device: a row is cut into shards of kShard columns, a CTA owns one
// shard, a thread owns quads of four neighbouring columns (one Philox call each) kShardThreads
// quads apart, so that a warp's loads are contiguous. The cut depends on the vocabulary alone:
// results do not depend on the batch.
#pragma once

#include <cstdint>

#include "argmax.h"
#include "logits.h"
#include "vec.h"

namespace dflash {

inline constexpr int kShardThreads = 256;
inline constexpr int kShardQuads = 4;  // a thread
inline constexpr int kShard = kShardThreads * kShardQuads * 4;

inline int64_t num_shards(int64_t vocab_size) { return (vocab_size + kShard - 1) / kShard; }

#if defined(__CUDACC__)

struct Quads {
  float x[kShardQuads][4];
};

// First column of this thread's quad g.
__device__ __forceinline__ int64_t quad_column(int64_t shard, int g) {
  return shard * kShard + 4 * (g * kShardThreads + static_cast<int>(threadIdx.x));
}

template <typename T>
__device__ __forceinline__ bool quads_are_aligned(const T* row) {
  return reinterpret_cast<uintptr_t>(row) % sizeof(Vec<T, 4>) == 0;
}

template <typename T>
__device__ __forceinline__ void load_quads(const T* row, float scale, int64_t vocab_size,
                                           int64_t shard, Quads& q) {
  const bool aligned = quads_are_aligned(row);
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
    const int64_t column = quad_column(shard, g);
    if (aligned && column + 4 <= vocab_size) {
      const Vec<T, 4> v = load_vec<4>(row + column);
#pragma unroll
      for (int k = 0; k < 4; ++k) q.x[g][k] = clean_logit(to_float(v.x[k]) * scale);
      continue;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      q.x[g][k] = column + k < vocab_size ? clean_logit(to_float(row[column + k]) * scale)
                                          : kNegativeInfinity;
    }
  }
}

// Clean logits of this thread, -inf past the vocabulary.
__device__ __forceinline__ Quads load_quads(const LogitsRow& row, int64_t vocab_size,
                                            int64_t shard) {
  Quads q;
  DFLASH_DISPATCH_FLOATING(row.dtype, load_quads(static_cast<const scalar_t*>(row.data), row.scale,
                                                 vocab_size, shard, q));
  return q;
}

// Key of this thread's first maximum; columns ascend with g and k.
__device__ __forceinline__ uint64_t best_key(const Quads& q, int64_t shard) {
  float best = kNegativeInfinity;
  int place = 0;
#pragma unroll
  for (int g = 0; g < kShardQuads; ++g) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (!(q.x[g][k] > best)) continue;
      best = q.x[g][k];
      place = 4 * g + k;
    }
  }
  return argmax_key(best, quad_column(shard, place / 4) + place % 4);
}

// max and sum(exp(x - softmax_origin(max))) of a part of a row.
struct MaxSum {
  float max;
  float sum;
};

struct LargerKey {
  static constexpr uint64_t kIdentity = 0;
  __device__ static uint64_t combine(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

struct SumOf {
  static constexpr float kIdentity = 0.0f;
  __device__ static float combine(float a, float b) { return a + b; }
};

struct MergedMaxSum {
  static constexpr MaxSum kIdentity = {kNegativeInfinity, 0.0f};
  __device__ static MaxSum combine(MaxSum a, MaxSum b) {
    const float max = fmaxf(a.max, b.max);
    const float origin = softmax_origin(max);
    return MaxSum{max, a.sum * expf(a.max - origin) + b.sum * expf(b.max - origin)};
  }
};

template <typename T>
__device__ __forceinline__ T shuffle_xor(T x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}

template <>
__device__ __forceinline__ MaxSum shuffle_xor<MaxSum>(MaxSum x, int mask) {
  return MaxSum{shuffle_xor(x.max, mask), shuffle_xor(x.sum, mask)};
}

// In every lane; combined in an order that never changes.
template <typename Op, typename T>
__device__ __forceinline__ T warp_reduce(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) {
    const T other = shuffle_xor(x, mask);
    // The lower lane's operand comes first: both lanes compute the same bits.
    x = threadIdx.x & mask ? Op::combine(other, x) : Op::combine(x, other);
  }
  return x;
}

// In the first warp; for kShardThreads threads.
template <typename Op, typename T>
__device__ __forceinline__ T block_reduce(T x) {
  constexpr int kWarps = kShardThreads / 32;
  __shared__ T partial[kWarps];
  x = warp_reduce<Op>(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  if (threadIdx.x >= 32) return x;
  return warp_reduce<Op>(threadIdx.x < kWarps ? partial[threadIdx.x] : T(Op::kIdentity));
}

// A warp's reduction of one row's partial results.
template <typename Op, typename T>
__device__ __forceinline__ T reduce_partials(const T* partials, int64_t count) {
  T x = Op::kIdentity;
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) x = Op::combine(x, partials[i]);
  return warp_reduce<Op>(x);
}

#endif  // __CUDACC__

}  // namespace dflash
