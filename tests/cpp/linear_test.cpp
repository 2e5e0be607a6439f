// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear.h"

#include <gtest/gtest.h>

#include <vector>

namespace dflash {
namespace {

// Small integers: every sum is exact.
void expect_exact(int64_t num_rows, int64_t num_outputs, int64_t size) {
  std::vector<float> x(num_rows * size), weight(num_outputs * size), bias(num_outputs), output(num_rows * num_outputs);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 7) - 3;
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 5) - 2;
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = static_cast<float>(i);
  cpu::linear({x.data(), weight.data(), bias.data(), output.data(), num_rows, num_outputs, size, size, size, num_outputs,
               DType::kFloat32});
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t o = 0; o < num_outputs; ++o) {
      float sum = bias[o];
      for (int64_t k = 0; k < size; ++k) sum += x[r * size + k] * weight[o * size + k];
      ASSERT_EQ(output[r * num_outputs + o], sum) << "row " << r << " output " << o;
    }
  }
}

TEST(Linear, IsExactAtAwkwardSizes) {
  for (int64_t rows : {1, 3, 4, 5, 8, 11}) {
    for (int64_t outputs : {1, 2, 3, 6, 7, 100}) {
      for (int64_t size : {1, 7, 8, 24, 27}) expect_exact(rows, outputs, size);
    }
  }
}

// Qwen3-8B's, 4B's, 14B's, 32B's and Llama-3.1-8B's gate and up: only where pairs of SMs are busy to the end.
TEST(GemmPlan, TakesRowBlocksThatFillTheSms) {
  alignas(16) static uint16_t data[8];
  const auto takes = [](int64_t num_rows, int64_t num_outputs) {
    return gemm::takes_row_blocks({data, data, num_rows, num_outputs, 4096, 4096, 4096, DType::kBFloat16});
  };
  for (int64_t num_rows : {225, 256, 449, 512}) EXPECT_TRUE(takes(num_rows, 24576)) << num_rows;
  for (int64_t num_rows : {128, 129, 224, 257, 448, 513}) EXPECT_FALSE(takes(num_rows, 24576)) << num_rows;
  for (int64_t num_outputs : {19456, 34816, 51200, 28672, 12288}) EXPECT_FALSE(takes(256, num_outputs)) << num_outputs;
}

}  // namespace
}  // namespace dflash
