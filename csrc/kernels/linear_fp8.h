// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/fp8_weight.h"
#include "common/gemm_plan.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct LinearFp8Params {
  const void* x;          // [num_rows, size]
  const uint8_t* weight;  // [ceil(num_outputs / 64), ceil(size / 64), 4096]: fp8_weight.h
  const float* scale;     // [num_outputs]
  const void* bias;       // [num_outputs] or null
  void* output;           // [num_rows, num_outputs]
  int64_t num_rows;
  int64_t num_outputs;
  int64_t size;
  int64_t x_stride;
  int64_t output_stride;
  DType dtype;

  // Of at most gemm::kMaxRows rows from `row` on.
  gemm::Operands operands(int64_t row = 0) const {
    const int64_t left = num_rows - row, rows = left < gemm::kMaxRows ? left : gemm::kMaxRows;
    const uint8_t* from = static_cast<const uint8_t*>(x) + row * x_stride * 2;
    const int64_t weight_stride = fp8::num_tiles(size) * fp8::kTileSize;
    return {from, weight, rows, num_outputs, size, x_stride, weight_stride, dtype};
  }
};

namespace cpu {
void linear_fp8(const LinearFp8Params& params);
}

#ifdef DFLASH_CUDA
// sm_90, within gemm::can_stream, 128 rows at a time; else cudaErrorInvalidValue.
cudaError_t launch_linear_fp8(const LinearFp8Params& params, cudaStream_t stream);

// rows [count, size] of params.dtype = weight rows first.. times their scales; first % 64 is 0.
cudaError_t launch_unpack_fp8(const LinearFp8Params& params, int64_t first, int64_t count,
                              void* rows, cudaStream_t stream);
#endif

}  // namespace dflash
