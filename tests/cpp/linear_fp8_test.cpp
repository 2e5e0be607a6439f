// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_fp8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "typed.h"

namespace dflash::test {
namespace {

// Small integers, which e4m3 has exactly, and scales of powers of two: every sum is exact.
template <typename T>
void expect_exact(int64_t num_rows, int64_t num_outputs, int64_t size) {
  std::vector<float> x(num_rows * size), bias(num_outputs), scale(num_outputs);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3;
  for (int64_t i = 0; i < num_outputs; ++i) bias[i] = static_cast<float>(i % 9), scale[i] = i % 2 == 0 ? 0.5f : 2.0f;
  const auto weight_of = [&](int64_t row, int64_t k) { return static_cast<float>((row * size + k) % 5) - 2; };
  std::vector<uint8_t> weight(fp8::num_tiles(num_outputs) * fp8::num_tiles(size) * fp8::kTileBytes);
  for (int64_t row = 0; row < num_outputs; ++row) {
    for (int64_t k = 0; k < size; ++k) {
      const int64_t tile = row / 64 * fp8::num_tiles(size) + k / 64;
      const int at = fp8::row_offset(static_cast<int>(row % 64)) + fp8::column_offset(static_cast<int>(k % 64));
      weight[tile * fp8::kTileBytes + at] = from_float<Float8E4M3>(weight_of(row, k)).bits;
    }
  }
  std::vector<T> typed_x = typed<T>(x), typed_bias = typed<T>(bias), output(num_rows * (num_outputs + 3));
  cpu::linear_fp8({typed_x.data(), weight.data(), scale.data(), typed_bias.data(), output.data(), num_rows, num_outputs,
                   size, size, num_outputs + 3, kDType<T>});
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t o = 0; o < num_outputs; ++o) {
      float sum = 0;
      for (int64_t k = 0; k < size; ++k) sum += x[r * size + k] * weight_of(o, k);
      ASSERT_EQ(to_float(output[r * (num_outputs + 3) + o]), round_to<T>(sum * scale[o] + bias[o])) << r << " " << o;
    }
  }
}

TEST(LinearFp8, IsExactAtAwkwardSizes) {
  for (int64_t rows : {1, 3, 11}) {
    for (int64_t outputs : {1, 63, 64, 130}) {
      for (int64_t size : {1, 27, 64, 200}) {
        expect_exact<float>(rows, outputs, size);
        expect_exact<Half>(rows, outputs, size);
        expect_exact<BFloat16>(rows, outputs, size);
      }
    }
  }
}

// Of Qwen3-8B's and Qwen3-32B's drafters and of the demo's: warpgroups and splits, at any number of rows.
TEST(LinearFp8, PlanKeepsTheSmsStreaming) {
  struct Case {
    int64_t num_outputs, size;
    int warpgroups, splits;
  };
  const Case cases[] = {{6144, 4096, 2, 2},  {4096, 4096, 1, 2},   {24576, 4096, 3, 1}, {4096, 12288, 1, 2},
                        {4096, 20480, 1, 2}, {10240, 5120, 3, 2}, {5120, 8192, 2, 2},  {960, 576, 1, 1}};
  for (const Case& c : cases) {
    for (int64_t num_rows : {1, 16, 17, 64, 100, 128}) {
      const gemm::Operands operands{nullptr, nullptr, num_rows, c.num_outputs,
                                    c.size,  c.size,  c.size,   DType::kBFloat16};
      const gemm::Choice choice = gemm::choose_packed(operands);
      EXPECT_EQ(choice.warpgroups, c.warpgroups) << c.num_outputs;
      EXPECT_EQ(choice.splits, c.splits) << c.num_outputs << " " << num_rows;
      EXPECT_GE(choice.rows, num_rows);
    }
  }
}

// Every byte of a tile belongs to one weight.
TEST(LinearFp8, OffsetsAreAPermutation) {
  std::vector<int> at;
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 64; ++column) at.push_back(fp8::row_offset(row) + fp8::column_offset(column));
  }
  std::sort(at.begin(), at.end());
  for (int i = 0; i < fp8::kTileBytes; ++i) ASSERT_EQ(at[i], i);
}

}  // namespace
}  // namespace dflash::test
