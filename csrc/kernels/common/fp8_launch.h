// SPDX-License-Identifier: Apache-2.0
// What the products with e4m3 weights have in common: an output's scale and bias, and rows 128 at a
// time.
#pragma once

#include "../linear_fp8.h"
#include "gemm_launch.h"
#include "gemm_store.h"

namespace dflash::fp8 {

// Store: kMatrices of a fragment's two that leave, and pack<T>(fragment, packed), which makes them.
template <typename T, class Store>
struct Fp8Epilogue {
  static constexpr bool kInterleaved = false, kHasState = false, kPacked = true;
  using Rows = gemm::RowStore<T, Store::kMatrices>;
  static constexpr int kBytes = Rows::kBytes;

  Rows rows;
  const float* scale;
  const T* bias;
  int num_outputs;  // of the weight

  Fp8Epilogue(const LinearFp8Params& p, int64_t row)
      : rows(static_cast<T*>(p.output) + row * p.output_stride, p.output_stride,
             p.num_outputs * Store::kMatrices / 2),
        scale(p.scale),
        bias(static_cast<const T*>(p.bias)),
        num_outputs(static_cast<int>(p.num_outputs)) {}

  // A thread's two outputs; past the last the products are zeros that nobody stores.
  struct Tile {
    const Rows& rows;
    float s0, s1, b0, b1;

    template <int kFirst, int kRows, int kFragments>
    __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], int num_rows,
                                           int column, uint8_t* smem) const {
      rows.template put<kFirst, kRows>(
          acc, num_rows, column / 2 * Store::kMatrices, smem,
          [&](const float(&sums)[4], uint32_t(&packed)[Store::kMatrices]) {
            const float values[4] = {sums[0] * s0 + b0, sums[1] * s0 + b0, sums[2] * s1 + b1,
                                     sums[3] * s1 + b1};
            Store::template pack<T>(values, packed);
          });
    }
  };

  __device__ __forceinline__ Tile of_tile(int column) const {
    const int mine = column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    return {rows, scale_of(mine), scale_of(mine + 8), bias_of(mine), bias_of(mine + 8)};
  }

  __device__ __forceinline__ float scale_of(int output) const {
    return output < num_outputs ? scale[output] : 0.0f;
  }

  __device__ __forceinline__ float bias_of(int output) const {
    return bias != nullptr && output < num_outputs ? to_float(bias[output]) : 0.0f;
  }
};

template <typename T, class Store>
cudaError_t launch_rows(const LinearFp8Params& p, cudaStream_t stream) {
  for (int64_t row = 0; row < p.num_rows; row += gemm::kMaxRows) {
    const Fp8Epilogue<T, Store> epilogue(p, row);
    const cudaError_t error = gemm::launch_gemm<T>(p.operands(row), epilogue, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Store>
cudaError_t launch(const LinearFp8Params& p, cudaStream_t stream) {
  if (device_properties().major != 9) return cudaErrorInvalidValue;
  if (p.dtype == DType::kFloat16) return launch_rows<Half, Store>(p, stream);
  return launch_rows<BFloat16, Store>(p, stream);
}

}  // namespace dflash::fp8
