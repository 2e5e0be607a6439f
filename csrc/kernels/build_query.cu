// SPDX-License-Identifier: Apache-2.0
// Context rows and query block of the drafter, all K/V groups in one launch. A thread owns one
// context row (it finds its request by binary search: no host knows the ragged lengths) or one
// query row with its sample row. Bytes moved: about 32 a context row and 64 a query row, and 12
// more a group.
#include "build_query.h"

#include "common/query_row.h"

namespace dflash {
namespace {

constexpr int kThreads = 128;

// Context rows, then query rows, then the last offset.
__host__ __device__ int64_t num_items(const BuildQueryParams& p) {
  return p.num_context_rows + static_cast<int64_t>(p.num_output_reqs) * p.num_query_per_req + 1;
}

__global__ void __launch_bounds__(kThreads)
    build_query_kernel(const __grid_constant__ BuildQueryParams p) {
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (item >= num_items(p)) return;
  if (item < p.num_context_rows) {
    build_context_row(p, static_cast<int32_t>(item));
  } else {
    build_query_row(p, static_cast<int32_t>(item - p.num_context_rows));
  }
}

}  // namespace

cudaError_t launch_build_query(const BuildQueryParams& params, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>((num_items(params) + kThreads - 1) / kThreads);
  build_query_kernel<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash
