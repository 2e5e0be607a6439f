// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/gemm_plan.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct LinearSiluMulParams {
  const void* x;       // [num_rows, size]
  const void* weight;  // [2 * num_outputs, size]: gate, then up
  void* output;        // [num_rows, num_outputs]
  int64_t num_rows;
  int64_t num_outputs;
  int64_t size;
  int64_t x_stride;
  int64_t weight_stride;
  int64_t output_stride;
  DType dtype;

  gemm::Operands operands() const {
    return {x, weight, num_rows, 2 * num_outputs, size, x_stride, weight_stride, dtype};
  }
};

// Whether one kernel does it: 8 rows of gate and 8 of up take turns in its tiles.
inline bool can_fuse(const LinearSiluMulParams& p) {
  const gemm::Operands o = p.operands();
  return p.num_outputs % 8 == 0 && (gemm::can_stream(o) || gemm::takes_row_blocks(o));
}

#ifdef DFLASH_CUDA
// sm_90, within can_fuse; else cudaErrorInvalidValue.
cudaError_t launch_linear_silu_mul(const LinearSiluMulParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
