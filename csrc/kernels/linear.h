// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/gemm_plan.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

// For few rows: the twin takes fp32, the kernel bf16 and fp16; elsewhere the library's GEMM serves.
struct LinearParams {
  const void* x;       // [num_rows, size]
  const void* weight;  // [num_outputs, size]
  const void* bias;    // [num_outputs] or null
  void* output;        // [num_rows, num_outputs]
  int64_t num_rows;
  int64_t num_outputs;
  int64_t size;
  int64_t x_stride;
  int64_t weight_stride;  // the twin's is size
  int64_t output_stride;
  DType dtype;
  bool writes_float = false;  // the sums as they are, else rounded to dtype

  gemm::Operands operands() const {
    return {x, weight, num_rows, num_outputs, size, x_stride, weight_stride, dtype};
  }
};

namespace cpu {
void linear(const LinearParams& params);
}

#ifdef DFLASH_CUDA
// sm_90, within gemm::can_stream; else cudaErrorInvalidValue.
cudaError_t launch_linear(const LinearParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
