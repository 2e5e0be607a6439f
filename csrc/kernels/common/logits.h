// SPDX-License-Identifier: Apache-2.0
// Rows of logits in any model dtype, and what is computed of one logit on host and device alike.
#pragma once

#include <cstdint>

#include "argmax.h"
#include "dtype.h"

namespace dflash {

// One row; a logit is the stored value * scale.
struct LogitsRow {
  const void* data;
  DType dtype;
  float scale;
};

// max and 1 / sum(exp(logit - max)); a row without a finite logit has inv_sum 0.
struct Softmax {
  float max;
  float inv_sum;
};

// NaN counts as -inf and +inf as the largest float, so that differences of logits are never NaN.
DFLASH_HOST_DEVICE float clean_logit(float x) {
  constexpr float kLargest = 3.402823466e38f;
  return x <= kLargest ? x : (x == x ? kLargest : kNegativeInfinity);
}

// The pointer to element `index` of an array of dtype.
DFLASH_HOST_DEVICE const void* element(const void* data, DType dtype, int64_t index) {
  return static_cast<const char*>(data) + index * (dtype == DType::kFloat32 ? 4 : 2);
}

DFLASH_HOST_DEVICE float logit_at(const LogitsRow& row, int64_t token) {
  float x = kNegativeInfinity;
  DFLASH_DISPATCH_FLOATING(row.dtype, x = to_float(static_cast<const scalar_t*>(row.data)[token]));
  return clean_logit(x * row.scale);
}

// The origin of a row's exponents: 0 where every logit is -inf.
DFLASH_HOST_DEVICE float softmax_origin(float max) { return max > kNegativeInfinity ? max : 0.0f; }

}  // namespace dflash
