// SPDX-License-Identifier: Apache-2.0
// output = silu(gate) * up with [gate, up] = x weight^T, for few rows: the streaming GEMM over 8 rows
// of gate and 8 of up in turns. Both are rounded as if they had been stored, so the result is that of
// linear and silu_mul, bit for bit. Bytes moved: the weight, once.
#include "linear_silu_mul.h"

#include "common/gemm_launch.h"
#include "common/silu.h"
#include "common/vec.h"

namespace dflash {
namespace {

template <typename T>
struct SiluMulEpilogue {
  static constexpr bool kInterleaved = true;
  static constexpr int kChunk = 16;  // 8 of gate, 8 of up

  T* output;
  int64_t stride;
  int num_outputs;  // a multiple of 8
  bool aligned;

  __device__ __forceinline__ void operator()(int row, int column, const float (&sum)[16]) const {
    const int first = column / 2;
    if (first >= num_outputs) return;
    T* to = output + row * stride + first;
    Vec<T, 8> rounded;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rounded.x[i] = from_float<T>(silu_mul_of(round_to<T>(sum[i]), round_to<T>(sum[8 + i])));
    }
    if (aligned) return store_vec<8>(to, rounded);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = rounded.x[i];
  }
};

template <typename T>
cudaError_t launch(const LinearSiluMulParams& p, cudaStream_t stream) {
  SiluMulEpilogue<T> epilogue;
  epilogue.output = static_cast<T*>(p.output);
  epilogue.stride = p.output_stride;
  epilogue.num_outputs = static_cast<int>(p.num_outputs);
  epilogue.aligned = rows_are_vectorizable<T>(p.output, p.output_stride, kVec<T>);
  return gemm::launch_gemm<T>(p.operands(), epilogue, stream);
}

}  // namespace

cudaError_t launch_linear_silu_mul(const LinearSiluMulParams& params, cudaStream_t stream) {
  if (device_properties().major != 9 || !can_fuse(params)) return cudaErrorInvalidValue;
  if (params.dtype == DType::kFloat16) return launch<Half>(params, stream);
  return launch<BFloat16>(params, stream);
}

}  // namespace dflash
