// SPDX-License-Identifier: Apache-2.0
// Tensor maps for the bulk copy engine. A map is a kernel parameter: a captured graph keeps its own
// copy.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "dtype.h"

namespace dflash {

struct TensorMapDim {
  int64_t size;
  int64_t stride;  // elements; the first dimension's is 1
  int box;
};

enum class TensorMapSwizzle { kNone, k128Bytes };

// Of a 16-bit tensor, innermost dimension first: boxes of 64 elements in 128-byte swizzled rows, or
// rows of any size as they are; zeros outside. The driver's encoder is found at run time: nothing
// links libcuda.
cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* base,
                            std::initializer_list<TensorMapDim> dims,
                            TensorMapSwizzle swizzle = TensorMapSwizzle::k128Bytes);

}  // namespace dflash
