// SPDX-License-Identifier: Apache-2.0
// x @ weight^T for few rows: every weight is read once, in order, and never packed. A tile is 4 rows of x and 3 of the
// weight, 12 accumulators of 8 lanes. An output's sum has one order whatever the number of rows.
#include "kernels/linear.h"

#include "simd.h"

namespace dflash::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kTileRows = 4;
constexpr int kTileOutputs = 3;

typedef float Lanes __attribute__((vector_size(4 * kLanes), aligned(4)));

// kRows x kOutputs dot products. With kPrefetch the weights of the next tile are asked for on the way.
template <int kRows, int kOutputs, bool kPrefetch>
DFLASH_INLINE void tile(const LinearParams& p, int64_t row, int64_t output) {
  const float* x = static_cast<const float*>(p.x) + row * p.x_stride;
  const float* weight = static_cast<const float*>(p.weight) + output * p.size;
  const float* bias = static_cast<const float*>(p.bias);
  const int64_t whole = p.size / kLanes * kLanes;
  Lanes sums[kRows][kOutputs] = {};
  for (int64_t k = 0; k < whole; k += kLanes) {
    Lanes w[kOutputs];
    for (int o = 0; o < kOutputs; ++o) {
      if (kPrefetch) __builtin_prefetch(weight + (kOutputs + o) * p.size + k);
      w[o] = *reinterpret_cast<const Lanes*>(weight + o * p.size + k);
    }
    for (int r = 0; r < kRows; ++r) {
      const Lanes a = *reinterpret_cast<const Lanes*>(x + r * p.x_stride + k);
      for (int o = 0; o < kOutputs; ++o) sums[r][o] += a * w[o];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int o = 0; o < kOutputs; ++o) {
      float sum = bias != nullptr ? bias[output + o] : 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[r][o][lane];
      for (int64_t k = whole; k < p.size; ++k) sum += x[r * p.x_stride + k] * weight[o * p.size + k];
      static_cast<float*>(p.output)[(row + r) * p.output_stride + output + o] = sum;
    }
  }
}

// All rows against kOutputs weights; the first tile brings the next weights in.
template <int kOutputs, bool kPrefetch>
DFLASH_INLINE void all_rows(const LinearParams& p, int64_t output) {
  int64_t row = 0;
  if (p.num_rows >= kTileRows) {
    tile<kTileRows, kOutputs, kPrefetch>(p, 0, output);
    for (row = kTileRows; row + kTileRows <= p.num_rows; row += kTileRows) {
      tile<kTileRows, kOutputs, false>(p, row, output);
    }
  }
  for (; row < p.num_rows; ++row) tile<1, kOutputs, kPrefetch>(p, row, output);
}

DFLASH_CPU_CLONES void outputs(const LinearParams& p, int64_t begin, int64_t end) {
  int64_t output = begin;
  for (; output + 2 * kTileOutputs <= end; output += kTileOutputs) {
    all_rows<kTileOutputs, true>(p, output);
  }
  for (; output < end; ++output) all_rows<1, false>(p, output);
}

}  // namespace

void linear(const LinearParams& params) {
  const int64_t work = params.num_rows * params.size;
  parallel_for(params.num_outputs, 1 + (1 << 18) / work,
               [&](int64_t begin, int64_t end) { outputs(params, begin, end); });
}

}  // namespace dflash::cpu
