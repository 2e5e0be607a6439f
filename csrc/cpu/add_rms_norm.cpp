// SPDX-License-Identifier: Apache-2.0
#include "kernels/add_rms_norm.h"

#include "norm.h"

namespace dflash::cpu {
namespace {

// Columns handled at once, as floats: the sum of squares is of what the residual holds after
// rounding.
constexpr int64_t kTile = 256;

template <typename scalar_t>
DFLASH_INLINE float add_tile(const scalar_t* x, scalar_t* residual, scalar_t* tap, int64_t size) {
  float h[kTile];
  if (x != nullptr) {
    for (int64_t i = 0; i < size; ++i)
      residual[i] = from_float<scalar_t>(to_float(residual[i]) + to_float(x[i]));
  }
  for (int64_t i = 0; i < size; ++i) h[i] = to_float(residual[i]);
  if (tap != nullptr) std::memcpy(tap, residual, static_cast<size_t>(size) * sizeof(scalar_t));
  return sum_of_squares(h, size);
}

template <typename scalar_t>
DFLASH_INLINE void row(const AddRmsNormParams& p, int64_t r) {
  const scalar_t* x = p.x == nullptr ? nullptr : static_cast<const scalar_t*>(p.x) + r * p.x_stride;
  scalar_t* residual = static_cast<scalar_t*>(p.residual) + r * p.residual_stride;
  scalar_t* tap = p.tap == nullptr ? nullptr : static_cast<scalar_t*>(p.tap) + r * p.tap_stride;
  scalar_t* output = static_cast<scalar_t*>(p.output) + r * p.output_stride;
  const scalar_t* weight = static_cast<const scalar_t*>(p.weight);
  float sum = 0.0f;
  for (int64_t i = 0; i < p.size; i += kTile) {
    const int64_t size = p.size - i < kTile ? p.size - i : kTile;
    sum += add_tile(x == nullptr ? nullptr : x + i, residual + i,
                    tap == nullptr ? nullptr : tap + i, size);
  }
  const float scale = rms_scale(sum, p.size, p.eps);
  for (int64_t i = 0; i < p.size; ++i) {
    output[i] = from_float<scalar_t>(to_float(residual[i]) * scale * to_float(weight[i]));
  }
}

DFLASH_CPU_CLONES void rows(const AddRmsNormParams& p, int64_t begin, int64_t end) {
  DFLASH_DISPATCH_FLOATING(p.dtype, for (int64_t r = begin; r < end; ++r) row<scalar_t>(p, r));
}

}  // namespace

void add_rms_norm(const AddRmsNormParams& params) {
  parallel_for(params.num_rows, 1 + 32768 / params.size,
               [&](int64_t begin, int64_t end) { rows(params, begin, end); });
}

}  // namespace dflash::cpu
