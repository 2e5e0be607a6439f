// SPDX-License-Identifier: Apache-2.0
// K and V of context rows, out of the GEMM's output, into the caches of all layers. A group of 8,
// 16 or 32 lanes owns one head of one layer's K or V of one row; neighbouring groups read
// neighbouring heads. A rejected row reads nothing. Bytes moved: 4 * num_rows * num_layers *
// num_kv_heads * head_dim * sizeof(T), 16 a lane where all is aligned.
#include "precompute_context_kv.h"

#include "common/context_head.h"

namespace dflash {
namespace {

constexpr int kThreads = 128;

template <typename T, typename Cache, int kN, int kLanes>
__global__ void __launch_bounds__(kThreads)
    precompute_context_kv_kernel(const __grid_constant__ PrecomputeContextKvParams p) {
  extern __shared__ float4 shared[];
  constexpr int kGroups = kThreads / kLanes;
  const int group = threadIdx.x / kLanes;
  const int heads_per_row = p.num_layers * 2 * p.num_kv_heads;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kGroups + group;
  const int64_t row = item / heads_per_row;
  if (row >= p.num_rows) return;
  const int column =
      static_cast<int>(item - row * heads_per_row);  // head among [layer, K or V, head]
  const T* x = static_cast<const T*>(p.kv) + item * p.head_dim;
  float* scratch = reinterpret_cast<float*>(shared) + group * p.head_dim;
  store_context_head<kN, kLanes, Cache>(p, row, column, x, scratch);
}

template <typename T, typename Cache, int kN, int kLanes>
cudaError_t launch_with(const PrecomputeContextKvParams& p, cudaStream_t stream) {
  constexpr int kGroups = kThreads / kLanes;
  const int64_t items = p.num_rows * p.num_layers * 2 * p.num_kv_heads;
  const unsigned grid = static_cast<unsigned>((items + kGroups - 1) / kGroups);
  const size_t shared_bytes = sizeof(float) * kGroups * p.head_dim;
  precompute_context_kv_kernel<T, Cache, kN, kLanes><<<grid, kThreads, shared_bytes, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, typename Cache>
cudaError_t launch(const PrecomputeContextKvParams& p, cudaStream_t stream) {
  if (!context_is_vectorizable<T, Cache>(p)) return launch_with<T, Cache, 1, 32>(p, stream);
  DFLASH_DISPATCH_LANES(p.head_dim / kVec<T>,
                        return (launch_with<T, Cache, kVec<T>, kLanes>(p, stream)));
}

}  // namespace

cudaError_t launch_precompute_context_kv(const PrecomputeContextKvParams& params,
                                         cudaStream_t stream) {
  DFLASH_DISPATCH_CACHE(params.dtype, params.cache_dtype,
                        return (launch<scalar_t, cache_t>(params, stream)));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
