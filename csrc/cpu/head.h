// SPDX-License-Identifier: Apache-2.0
// One head as floats on the stack: bias, RMSNorm, RoPE and the store with its one rounding.
#pragma once

#include "kernels/common/kv_cache.h"
#include "norm.h"

namespace dflash::cpu {

template <typename T>
DFLASH_INLINE void load_head(const T* from, const T* bias, int size, float* x) {
  for (int i = 0; i < size; ++i) x[i] = to_float(from[i]);
  if (bias == nullptr) return;
  for (int i = 0; i < size; ++i) x[i] += to_float(bias[i]);
}

template <typename T>
DFLASH_INLINE void norm_head(float* x, const T* weight, int size, float eps) {
  if (weight == nullptr) return;
  const float scale = rms_scale(sum_of_squares(x, size), size, eps);
  for (int i = 0; i < size; ++i) x[i] = x[i] * scale * to_float(weight[i]);
}

DFLASH_INLINE void rotate_neox(float* __restrict__ lower, float* __restrict__ upper,
                               const float* __restrict__ cos_sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = lower[i], b = upper[i];
    const float cosine = cos_sin[i], sine = cos_sin[half + i];
    lower[i] = a * cosine - b * sine;
    upper[i] = b * cosine + a * sine;
  }
}

DFLASH_INLINE void rotate_interleaved(float* __restrict__ x, const float* __restrict__ cos_sin,
                                      int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    const float cosine = cos_sin[i], sine = cos_sin[half + i];
    x[2 * i] = a * cosine - b * sine;
    x[2 * i + 1] = b * cosine + a * sine;
  }
}

DFLASH_INLINE void rotate_head(float* x, const RopeTable& rope, int64_t position) {
  const float* cos_sin = rope.cos_sin + position * rope.stride;
  const int half = rope.rotary_dim / 2;
  if (rope.is_neox) return rotate_neox(x, x + half, cos_sin, half);
  rotate_interleaved(x, cos_sin, half);
}

template <typename T>
DFLASH_INLINE void store_head(const float* x, int size, float scale, T* to) {
  for (int i = 0; i < size; ++i) to[i] = to_cache<T>(x[i], scale);
}

}  // namespace dflash::cpu
