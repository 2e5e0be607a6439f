// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct AddRmsNormParams {
  const void* x;       // [num_rows, size] or null: residual stays as it is
  void* residual;      // [num_rows, size]
  const void* weight;  // [size]
  void* output;        // [num_rows, size]
  void* tap;           // [num_rows, size] or null: columns of a wider buffer
  int64_t num_rows;
  int64_t size;
  int64_t x_stride;
  int64_t residual_stride;
  int64_t output_stride;
  int64_t tap_stride;
  float eps;
  DType dtype;
};

namespace cpu {
void add_rms_norm(const AddRmsNormParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_add_rms_norm(const AddRmsNormParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
