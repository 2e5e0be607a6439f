// SPDX-License-Identifier: Apache-2.0
// Passes over one row of logits, a tile at a time: plain loops over a buffer in L1, inlined into
// the twins' clones.
#pragma once

#include <cstdint>

#include "kernels/common/acceptance.h"
#include "kernels/common/argmax.h"
#include "kernels/common/logits.h"
#include "kernels/common/philox.h"
#include "simd.h"

namespace dflash::cpu {

constexpr int64_t kTile = 1024;
constexpr int64_t kLanes = 16;

inline int64_t tile_size(int64_t vocab_size, int64_t begin) {
  return vocab_size - begin < kTile ? vocab_size - begin : kTile;
}

inline int64_t round_to_lanes(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// exp(x) for x <= 0, exactly 0 for -inf.
DFLASH_INLINE float exp_or_zero(float x) { return x > -87.0f ? fast_exp(x) : 0.0f; }

// Clean logits begin .. begin + count of the row, with -inf up to a multiple of kLanes.
DFLASH_INLINE void load_tile(const LogitsRow& row, int64_t begin, int64_t count, float* out) {
  const float scale = row.scale;
  DFLASH_DISPATCH_FLOATING(row.dtype, {
    const scalar_t* in = static_cast<const scalar_t*>(row.data) + begin;
    for (int64_t i = 0; i < count; ++i) out[i] = clean_logit(to_float(in[i]) * scale);
  });
  for (int64_t i = count; i < round_to_lanes(count); ++i) out[i] = kNegativeInfinity;
}

// Noise words of tokens begin .. begin + count, begin a multiple of 4; writes up to a multiple of
// kLanes.
DFLASH_INLINE void load_words(const NoiseKey& noise, int64_t begin, int64_t count, uint32_t* out) {
  const NoiseKey key = noise;
  const uint32_t first = static_cast<uint32_t>(begin / 4);
  const int64_t quads = round_to_lanes(count) / 4;
  for (int64_t q = 0; q < quads; ++q) {
    const Philox4 words = stream_words(key, first + static_cast<uint32_t>(q));
    for (int k = 0; k < 4; ++k) out[4 * q + k] = words.x[k];
  }
}

DFLASH_INLINE float tile_max(const float* x, int64_t count) {
  float lanes[kLanes];
  for (int64_t k = 0; k < kLanes; ++k) lanes[k] = kNegativeInfinity;
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] = x[i + k] > lanes[k] ? x[i + k] : lanes[k];
  }
  float best = lanes[0];
  for (int64_t k = 1; k < kLanes; ++k) best = lanes[k] > best ? lanes[k] : best;
  return best;
}

DFLASH_INLINE float tile_sum(const float* x, int64_t count) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) lanes[k] += x[i + k];
  }
  float sum = 0.0f;
  for (int64_t k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum;
}

// First maximum over tiles given in order.
struct FirstMaximum {
  float value = kNegativeInfinity;
  int64_t index = 0;
};

DFLASH_INLINE void update(FirstMaximum& best, const float* x, int64_t begin, int64_t count) {
  const float max = tile_max(x, count);
  if (!(max > best.value)) return;
  int64_t i = 0;
  while (x[i] != max) ++i;
  best = FirstMaximum{max, begin + i};
}

}  // namespace dflash::cpu
