// SPDX-License-Identifier: Apache-2.0
// residual += x; output = RMSNorm(residual) * weight; tap = residual. A CTA owns one row; a thread
// keeps kItems vectors of kN columns in registers between the sum of squares and the store, and
// reads what lies beyond them back. Bytes moved: (4 + (tap ? 1 : 0)) * num_rows * size * sizeof(T),
// 16 a thread where rows are aligned.
#include "add_rms_norm.h"

#include "common/overlap.h"
#include "common/reduce.h"
#include "common/vec.h"

namespace dflash {
namespace {

constexpr int kMaxThreads = 1024;

template <typename T>
__device__ __forceinline__ T* row_of(void* base, int64_t r, int64_t stride) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + r * stride;
}

template <typename T, int kN>
__device__ __forceinline__ void add(const Vec<T, kN>& x, Vec<T, kN>& residual) {
#pragma unroll
  for (int i = 0; i < kN; ++i)
    residual.x[i] = from_float<T>(to_float(residual.x[i]) + to_float(x.x[i]));
}

template <typename T, int kN>
__device__ __forceinline__ void store_sum(const Vec<T, kN>& h, bool is_new, T* residual, T* tap,
                                          int column) {
  if (is_new) store_vec<kN>(residual + column, h);
  if (tap != nullptr) store_vec<kN>(tap + column, h);
}

template <typename T, int kN>
__device__ __forceinline__ float sum_of_squares(const Vec<T, kN>& h) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kN; ++i) sum += to_float(h.x[i]) * to_float(h.x[i]);
  return sum;
}

template <typename T, int kN>
__device__ __forceinline__ void norm_and_store(const Vec<T, kN>& h, float scale,
                                               const Vec<T, kN>& w, T* output, int column) {
  Vec<T, kN> out;
#pragma unroll
  for (int i = 0; i < kN; ++i)
    out.x[i] = from_float<T>(to_float(h.x[i]) * scale * to_float(w.x[i]));
  store_vec<kN>(output + column, out);
}

template <typename T, int kN, int kItems>
__global__ void __launch_bounds__(kMaxThreads) add_rms_norm_kernel(const AddRmsNormParams p) {
  __shared__ float partials[32];
  const int64_t r = blockIdx.x;
  const T* x = row_of<T>(const_cast<void*>(p.x), r, p.x_stride);
  T* residual = row_of<T>(p.residual, r, p.residual_stride);
  T* tap = row_of<T>(p.tap, r, p.tap_stride);
  T* output = row_of<T>(p.output, r, p.output_stride);
  const T* weight = static_cast<const T*>(p.weight);
  const int size = static_cast<int>(p.size);
  const int first = static_cast<int>(threadIdx.x) * kN;
  const int step = static_cast<int>(blockDim.x) * kN;

  Vec<T, kN> kept[kItems], weights[kItems], added[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    if (first + item * step < size) weights[item] = load_vec<kN>(weight + first + item * step);
  }
  wait_for_predecessor();
  let_successor_start();
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = first + item * step;
    if (column < size) kept[item] = load_vec<kN>(static_cast<const T*>(residual) + column);
    if (column < size && x != nullptr) added[item] = load_vec<kN>(x + column);
  }
  float sum = 0.0f;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = first + item * step;
    if (column >= size) break;
    if (x != nullptr) add(added[item], kept[item]);
    store_sum(kept[item], x != nullptr, residual, tap, column);
    sum += sum_of_squares(kept[item]);
  }
  for (int column = first + kItems * step; column < size; column += step) {
    Vec<T, kN> h = load_vec<kN>(static_cast<const T*>(residual) + column);
    if (x != nullptr) add(load_vec<kN>(x + column), h);
    store_sum(h, x != nullptr, residual, tap, column);
    sum += sum_of_squares(h);
  }

  const float scale = 1.0f / sqrtf(block_sum(sum, partials) / static_cast<float>(size) + p.eps);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = first + item * step;
    if (column >= size) break;
    norm_and_store(kept[item], scale, weights[item], output, column);
  }
  for (int column = first + kItems * step; column < size; column += step) {
    norm_and_store(load_vec<kN>(static_cast<const T*>(residual) + column), scale,
                   load_vec<kN>(weight + column), output, column);
  }
}

template <typename T, int kN, int kItems>
cudaError_t launch_with(const AddRmsNormParams& p, cudaStream_t stream) {
  const int64_t wanted = (p.size + kN * kItems - 1) / (kN * kItems);
  const int threads =
      static_cast<int>(wanted < kMaxThreads ? (wanted + 31) / 32 * 32 : kMaxThreads);
  return launch_overlapped(add_rms_norm_kernel<T, kN, kItems>,
                           dim3(static_cast<unsigned>(p.num_rows)), threads, 0, stream, p);
}

template <typename T>
cudaError_t launch(const AddRmsNormParams& p, cudaStream_t stream) {
  const bool vectorizable = rows_are_vectorizable<T>(p.x, p.x_stride, p.size) &&
                            rows_are_vectorizable<T>(p.residual, p.residual_stride, p.size) &&
                            rows_are_vectorizable<T>(p.output, p.output_stride, p.size) &&
                            rows_are_vectorizable<T>(p.tap, p.tap_stride, p.size) &&
                            rows_are_vectorizable<T>(p.weight, 0, p.size);
  // NOTE: the number of rows must not choose: a row's bits would depend on the rows beside it.
  if (!vectorizable) return launch_with<T, 1, 4>(p, stream);
  return launch_with<T, kVec<T>, 2>(p, stream);
}

}  // namespace

cudaError_t launch_add_rms_norm(const AddRmsNormParams& params, cudaStream_t stream) {
  DFLASH_DISPATCH_FLOATING(params.dtype, return launch<scalar_t>(params, stream));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
