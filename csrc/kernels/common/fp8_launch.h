// SPDX-License-Identifier: Apache-2.0
// What the products with e4m3 weights have in common: a scale an output, and rows 128 at a time.
#pragma once

#include "../linear_fp8.h"
#include "gemm_launch.h"
#include "gemm_store.h"

namespace dflash::fp8 {

// The scale of an output, of `count`; past them the products are zeros that nobody stores.
__device__ __forceinline__ float scale_of(const float* scale, int output, int64_t count) {
  return output < count ? scale[output] : 0.0f;
}

template <typename T, class Epilogue>
cudaError_t launch_rows(const LinearFp8Params& p, cudaStream_t stream) {
  for (int64_t row = 0; row < p.num_rows; row += gemm::kMaxRows) {
    T* const output = static_cast<T*>(p.output) + row * p.output_stride;
    const Epilogue epilogue = Epilogue::of(p, output);
    const cudaError_t error = gemm::launch_gemm<T>(p.operands(row), epilogue, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Epilogue<T>::of(params, output) makes that of the rows that leave at `output`.
template <template <typename> class Epilogue>
cudaError_t launch(const LinearFp8Params& p, cudaStream_t stream) {
  if (device_properties().major != 9) return cudaErrorInvalidValue;
  if (p.dtype == DType::kFloat16) return launch_rows<Half, Epilogue<Half>>(p, stream);
  return launch_rows<BFloat16, Epilogue<BFloat16>>(p, stream);
}

}  // namespace dflash::fp8
