// SPDX-License-Identifier: Apache-2.0
// The sum that every RMSNorm of the CPU twins needs.
#pragma once

#include "simd.h"

namespace dflash::cpu {

// Sixteen partial sums: a single one may not be reordered, so it would not vectorise.
DFLASH_INLINE float sum_of_squares(const float* x, int64_t size) {
  constexpr int64_t kLanes = 16;
  float partial[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) partial[lane] += x[i + lane] * x[i + lane];
  }
  float sum = 0.0f;
  for (; i < size; ++i) sum += x[i] * x[i];
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += partial[lane];
  return sum;
}

DFLASH_INLINE float rms_scale(float sum, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

}  // namespace dflash::cpu
