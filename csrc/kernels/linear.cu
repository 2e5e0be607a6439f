// SPDX-License-Identifier: Apache-2.0
// output = x weight^T + bias for few rows: the streaming GEMM (common/gemm_mainloop.h), eight
// neighbouring outputs of a row a store; sums in fp32 leave as they lie in the fragments, 32 bytes
// of a row together. Bytes moved: the weight, once.
#include "linear.h"

#include "common/gemm_launch.h"
#include "common/gemm_store.h"

namespace dflash {
namespace {

template <typename T>
struct LinearEpilogue {
  static constexpr bool kInterleaved = false, kHasState = false, kPacked = false;
  static constexpr int kBytes = gemm::RowStore<T, 2>::kBytes;

  gemm::RowStore<T, 2> rows;
  const T* bias;

  template <int kFirst, int kRows, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], int num_rows,
                                         int column, uint8_t* smem) const {
    const int mine = column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const float b0 = bias_of(mine), b1 = bias_of(mine + 8);
    rows.template put<kFirst, kRows>(
        acc, num_rows, column, smem, [&](const float(&fragment)[4], uint32_t(&packed)[2]) {
          packed[0] = pack2<T>(fragment[0] + b0, fragment[1] + b0);
          packed[1] = pack2<T>(fragment[2] + b1, fragment[3] + b1);
        });
  }

  __device__ __forceinline__ float bias_of(int column) const {
    return bias != nullptr && column < rows.num_outputs ? to_float(bias[column]) : 0.0f;
  }
};

// The sums, neither rounded nor moved.
struct SumsEpilogue {
  static constexpr bool kInterleaved = false, kHasState = false, kPacked = false;
  static constexpr int kBytes = 0;

  float* output;
  int64_t stride;
  int num_outputs;

  template <int kFirst, int kRows, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], int num_rows,
                                         int column, uint8_t*) const {
    const int mine = column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    int row = kFirst + threadIdx.x % 4 * 2;
    float* to = output + row * stride + mine;
#pragma unroll
    for (int j = kFirst / 8; j < (kFirst + kRows) / 8; ++j, row += 8, to += 8 * stride) {
      put(to, row < num_rows, mine, acc[j][0], acc[j][2]);
      put(to + stride, row + 1 < num_rows, mine, acc[j][1], acc[j][3]);
    }
  }

  __device__ __forceinline__ void put(float* to, bool is_row, int column, float a, float b) const {
    if (is_row && column < num_outputs) to[0] = a;
    if (is_row && column + 8 < num_outputs) to[8] = b;
  }
};

template <typename T>
cudaError_t launch(const LinearParams& p, cudaStream_t stream) {
  if (p.writes_float) {
    if (p.bias != nullptr) return cudaErrorInvalidValue;
    const SumsEpilogue epilogue{static_cast<float*>(p.output), p.output_stride,
                                static_cast<int>(p.num_outputs)};
    return gemm::launch_gemm<T>(p.operands(), epilogue, stream);
  }
  const LinearEpilogue<T> epilogue{{p.output, p.output_stride, p.num_outputs},
                                   static_cast<const T*>(p.bias)};
  return gemm::launch_gemm<T>(p.operands(), epilogue, stream);
}

}  // namespace

cudaError_t launch_linear(const LinearParams& params, cudaStream_t stream) {
  if (device_properties().major != 9) return cudaErrorInvalidValue;
  if (params.dtype == DType::kFloat16) return launch<Half>(params, stream);
  return launch<BFloat16>(params, stream);
}

}  // namespace dflash
