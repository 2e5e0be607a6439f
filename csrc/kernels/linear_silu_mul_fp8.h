// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "linear_fp8.h"

namespace dflash {

#ifdef DFLASH_CUDA
// num_outputs counts gate and up, 8 rows of each in turns; output is [num_rows, num_outputs / 2];
// no bias. sm_90, within gemm::can_stream, 128 rows at a time; else cudaErrorInvalidValue.
cudaError_t launch_linear_silu_mul_fp8(const LinearFp8Params& params, cudaStream_t stream);
#endif

}  // namespace dflash
