// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash {

// fp32, few rows. On a GPU and for other shapes the library's GEMM serves.
struct LinearParams {
  const float* x;       // [num_rows, size]
  const float* weight;  // [num_outputs, size], rows contiguous
  const float* bias;    // [num_outputs] or null
  float* output;        // [num_rows, num_outputs]
  int64_t num_rows;
  int64_t num_outputs;
  int64_t size;
  int64_t x_stride;
  int64_t output_stride;
};

namespace cpu {
void linear(const LinearParams& params);
}

}  // namespace dflash
