// SPDX-License-Identifier: Apache-2.0
// x (weight * scale)^T + bias: 64 outputs at a time are unpacked and multiplied in fp32.
#include "kernels/linear_fp8.h"

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/linear.h"
#include "simd.h"

namespace dflash::cpu {
namespace {

std::array<float, 256> all_values() {
  std::array<float, 256> values;
  for (int i = 0; i < 256; ++i) values[i] = to_float(Float8E4M3{static_cast<uint8_t>(i)});
  return values;
}

// Rows of a group of 64, unscaled, [64, size].
void unpack(const uint8_t* tiles, int64_t size, float* rows) {
  static const std::array<float, 256> values = all_values();
  for (int64_t first = 0; first < size; first += fp8::kTileSize, tiles += fp8::kTileBytes) {
    const int count = static_cast<int>(std::min<int64_t>(fp8::kTileSize, size - first));
    for (int row = 0; row < fp8::kTileSize; ++row) {
      const uint8_t* from = tiles + fp8::row_offset(row);
      float* to = rows + row * size + first;
      for (int column = 0; column < count; ++column) to[column] = values[from[fp8::column_offset(column)]];
    }
  }
}

template <typename T>
void run(const LinearFp8Params& p) {
  std::vector<float> x(p.num_rows * p.size);
  for (int64_t row = 0; row < p.num_rows; ++row) {
    const T* from = static_cast<const T*>(p.x) + row * p.x_stride;
    for (int64_t k = 0; k < p.size; ++k) x[row * p.size + k] = to_float(from[k]);
  }
  const int64_t group_bytes = fp8::num_tiles(p.size) * fp8::kTileBytes;
  const T* bias = static_cast<const T*>(p.bias);
  parallel_for(fp8::num_tiles(p.num_outputs), 1, [&](int64_t begin, int64_t end) {
    std::vector<float> weight(fp8::kTileSize * p.size), sums(p.num_rows * fp8::kTileSize);
    for (int64_t group = begin; group < end; ++group) {
      const int64_t first = group * fp8::kTileSize, count = std::min<int64_t>(fp8::kTileSize, p.num_outputs - first);
      unpack(p.weight + group * group_bytes, p.size, weight.data());
      linear({x.data(), weight.data(), nullptr, sums.data(), p.num_rows, count, p.size, p.size, p.size,
              fp8::kTileSize, DType::kFloat32});
      for (int64_t row = 0; row < p.num_rows; ++row) {
        T* to = static_cast<T*>(p.output) + row * p.output_stride + first;
        for (int64_t o = 0; o < count; ++o) {
          const float sum = sums[row * fp8::kTileSize + o] * p.scale[first + o];
          to[o] = from_float<T>(bias == nullptr ? sum : sum + to_float(bias[first + o]));
        }
      }
    }
  });
}

}  // namespace

void linear_fp8(const LinearFp8Params& params) {
  DFLASH_DISPATCH_FLOATING(params.dtype, run<scalar_t>(params));
}

}  // namespace dflash::cpu
