// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct SiluMulParams {
  const void* gate_up;  // [num_rows, 2 * size]
  void* output;         // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  int64_t gate_up_stride;
  int64_t output_stride;
  DType dtype;
};

namespace cpu {
void silu_mul(const SiluMulParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_silu_mul(const SiluMulParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
