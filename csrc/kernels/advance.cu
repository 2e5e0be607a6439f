// SPDX-License-Identifier: Apache-2.0
// Commits what was sampled. One CTA: everyone reads the step before the one thread that increments
// it. A thread owns entries of the ring rows, then whole requests. Bytes moved: about 16 a token
// and 64 a request.
#include "advance.h"

#include "common/advance_row.h"

namespace dflash {
namespace {

constexpr int kThreads = 1024;

__global__ void __launch_bounds__(kThreads) advance_kernel(const AdvanceParams p) {
  const int64_t step = *p.step;
  const int64_t num_tokens = static_cast<int64_t>(p.num_reqs) * p.num_columns;
  for (int64_t i = threadIdx.x; i < num_tokens; i += kThreads) {
    advance_ring_token(p, step, static_cast<int32_t>(i / p.num_columns),
                       static_cast<int32_t>(i % p.num_columns));
  }
  for (int32_t r = threadIdx.x; r < p.num_reqs; r += kThreads) advance_row(p, step, r);
  __syncthreads();
  if (threadIdx.x == 0) *p.step = step + 1;
}

}  // namespace

cudaError_t launch_advance(const AdvanceParams& params, cudaStream_t stream) {
  advance_kernel<<<1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dflash
