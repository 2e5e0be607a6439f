// SPDX-License-Identifier: Apache-2.0
// A CTA's slice of a row of processed logits: how it is walked, what a logit weighs in a cut, and
// among which of them the kept part ends.
#pragma once

#include <cstdint>

#include "logit_rules.h"
#include "shard.h"
#include "vec.h"

namespace dflash {

inline constexpr int kRowThreads = 512;  // of each CTA of a row
inline constexpr int kDigitBits = 10;    // of a key

// Columns of this CTA and where its processed logits stand.
struct Slice {
  int64_t begin;
  int size;
  uint32_t* marks;  // a bit a column: some list of the row names it
  float* logits;
};

template <typename T>
__device__ __forceinline__ Vec<T, 4> load_quad(const T* x, int i, int size, bool aligned) {
  if (aligned && i + 4 <= size) return load_vec<4>(x + i);
  Vec<T, 4> v{};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (i + k < size) v.x[k] = x[i + k];
  }
  return v;
}

__device__ __forceinline__ void store_quad(float* x, int i, int size, bool aligned,
                                           const Vec<float, 4>& v) {
  if (aligned && i + 4 <= size) return store_vec<4>(x + i, v);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (i + k < size) x[i + k] = v.x[k];
  }
}

// fn(x) for this thread's processed logits.
template <typename Fn>
__device__ __forceinline__ void for_each_logit(const Slice& slice, const Fn& fn) {
  const bool aligned = quads_are_aligned(slice.logits);
  for (int i = 4 * threadIdx.x; i < slice.size; i += 4 * kRowThreads) {
    const Vec<float, 4> v = load_quad(slice.logits, i, slice.size, aligned);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k < slice.size) fn(v.x[k]);
    }
  }
}

// What a logit weighs in a cut.
template <bool kByMass>
struct Weight {
  float max;
  int mass_bits;
  float scale;  // 2^(2 * mass_bits)

  __device__ uint64_t operator()(float x) const {
    if (!kByMass) return 1;
    return __float2ull_rn(expf(x - max) * scale);
  }
};

// The logits among which the kept part ends: all, those of one bin (or of all before it too), or
// those of it that share the digits of their keys above `shift`.
struct Candidates {
  float max;
  int bin = -1;
  bool from_top = false;
  int shift = 32;
  uint32_t prefix = 0;

  __device__ int next_shift() const { return shift > kDigitBits ? shift - kDigitBits : 0; }
  __device__ uint32_t digit_mask() const { return (1u << (shift - next_shift())) - 1; }

  __device__ bool contain(float x) const {
    if (bin < 0) return true;
    const int own = logit_bin(max, x);
    if (from_top) return own <= bin;
    return own == bin && static_cast<uint64_t>(float_key(x)) >> shift == prefix;
  }

  // Ascending bins hold descending logits.
  __device__ int next_bin(float x) const {
    if (bin < 0) return logit_bin(max, x);
    return static_cast<int>(digit_mask() - (float_key(x) >> next_shift() & digit_mask()));
  }

  __device__ void narrow(int to) {
    if (bin < 0) {
      bin = to;
      return;
    }
    prefix = prefix << (shift - next_shift()) | (digit_mask() - static_cast<uint32_t>(to));
    shift = next_shift();
  }
};

}  // namespace dflash
