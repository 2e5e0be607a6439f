// SPDX-License-Identifier: Apache-2.0
// output = silu(gate) * up. A thread owns kN neighbouring columns of one row; grid.y strides over rows.
// Bytes moved: 3 * num_rows * size * sizeof(T), 16 a thread where rows are aligned.
#include "silu_mul.h"

#include "common/overlap.h"
#include "common/silu.h"
#include "common/vec.h"

namespace dflash {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

template <typename T, int kN>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(const SiluMulParams p) {
  wait_for_predecessor();
  let_successor_start();
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kN;
  if (column >= p.size) return;
  for (int64_t r = blockIdx.y; r < p.num_rows; r += gridDim.y) {
    const T* gate = static_cast<const T*>(p.gate_up) + r * p.gate_up_stride + column;
    const Vec<T, kN> g = load_vec<kN>(gate);
    const Vec<T, kN> u = load_vec<kN>(gate + p.size);
    Vec<T, kN> out;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      out.x[i] = from_float<T>(silu_mul_of(to_float(g.x[i]), to_float(u.x[i])));
    }
    store_vec<kN>(static_cast<T*>(p.output) + r * p.output_stride + column, out);
  }
}

template <typename T>
cudaError_t launch(const SiluMulParams& p, cudaStream_t stream) {
  const bool vectorizable = rows_are_vectorizable<T>(p.gate_up, p.gate_up_stride, p.size) &&
                            rows_are_vectorizable<T>(p.output, p.output_stride, p.size);
  const int width = vectorizable ? kVec<T> : 1;
  const int64_t columns = (p.size + width - 1) / width;
  const dim3 grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads),
                  static_cast<unsigned>(p.num_rows < kMaxGridY ? p.num_rows : kMaxGridY));
  const auto kernel = vectorizable ? silu_mul_kernel<T, kVec<T>> : silu_mul_kernel<T, 1>;
  return launch_overlapped(kernel, grid, kThreads, 0, stream, p);
}

}  // namespace

cudaError_t launch_silu_mul(const SiluMulParams& params, cudaStream_t stream) {
  DFLASH_DISPATCH_FLOATING(params.dtype, return launch<scalar_t>(params, stream));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
