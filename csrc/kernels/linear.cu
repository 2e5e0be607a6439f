// SPDX-License-Identifier: Apache-2.0
// output = x weight^T + bias for few rows: the streaming GEMM (common/gemm_mainloop.h), eight
// neighbouring outputs of a row a store. Bytes moved: the weight, once.
#include "linear.h"

#include "common/gemm_launch.h"
#include "common/vec.h"

namespace dflash {
namespace {

template <typename T>
struct LinearEpilogue {
  static constexpr bool kInterleaved = false;
  static constexpr int kChunk = 8;

  T* output;
  const T* bias;
  int64_t stride;
  int num_outputs;
  bool aligned;

  __device__ __forceinline__ void operator()(int row, int column, const float (&sum)[8]) const {
    if (column >= num_outputs) return;
    T* to = output + row * stride + column;
    const bool whole = column + 8 <= num_outputs;
    Vec<T, 8> rounded;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool biased = bias != nullptr && (whole || column + i < num_outputs);
      rounded.x[i] = from_float<T>(biased ? sum[i] + to_float(bias[column + i]) : sum[i]);
    }
    if (whole && aligned) return store_vec<8>(to, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i < num_outputs) to[i] = rounded.x[i];
    }
  }
};

template <typename T>
cudaError_t launch(const LinearParams& p, cudaStream_t stream) {
  LinearEpilogue<T> epilogue;
  epilogue.output = static_cast<T*>(p.output);
  epilogue.bias = static_cast<const T*>(p.bias);
  epilogue.stride = p.output_stride;
  epilogue.num_outputs = static_cast<int>(p.num_outputs);
  epilogue.aligned = rows_are_vectorizable<T>(p.output, p.output_stride, kVec<T>);
  return gemm::launch_gemm<T>(p.operands(), epilogue, stream);
}

}  // namespace

cudaError_t launch_linear(const LinearParams& params, cudaStream_t stream) {
  if (device_properties().major != 9) return cudaErrorInvalidValue;
  if (params.dtype == DType::kFloat16) return launch<Half>(params, stream);
  return launch<BFloat16>(params, stream);
}

}  // namespace dflash
