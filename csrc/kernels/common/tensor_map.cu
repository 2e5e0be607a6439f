// SPDX-License-Identifier: Apache-2.0
#include "tensor_map.h"

#include <cudaTypedefs.h>

namespace dflash {
namespace {

constexpr int kMaxRank = 5;
constexpr unsigned kVersion = 12000;  // of CUDA, which brought the function

PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             kVersion, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

}  // namespace

cudaError_t make_tensor_map(CUtensorMap* map, DType dtype, const void* base,
                            std::initializer_list<TensorMapDim> dims, TensorMapSwizzle swizzle) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank];
  cuuint32_t box[kMaxRank], steps[kMaxRank];
  int rank = 0;
  for (const TensorMapDim& dim : dims) {
    sizes[rank] = static_cast<cuuint64_t>(dim.size);
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(dim.stride) * 2;
    box[rank] = static_cast<cuuint32_t>(dim.box);
    steps[rank++] = 1;
  }
  const CUresult result = encode(
      map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      static_cast<cuuint32_t>(rank), const_cast<void*>(base), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle == TensorMapSwizzle::kNone ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace dflash
