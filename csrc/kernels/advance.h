// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct AdvanceParams {
  const int64_t* sampled_token_ids;  // [R, C]
  int64_t sampled_stride;
  const int32_t* num_sampled;     // [R]
  const int32_t* idx_mapping;     // [R], each state row at most once
  const int64_t* stop_token_ids;  // [S, K], -1 = unused; null when K = 0
  int64_t stop_stride;
  int32_t num_reqs;         // R
  int32_t num_columns;      // C
  int32_t num_stop_ids;     // K
  int64_t ring_size;        // steps that output_ring holds
  int64_t ring_stride;      // between steps
  int64_t ring_row_stride;  // between state rows
  int32_t* seq_lens;        // [S]
  int64_t* last_sampled;    // [S]
  int32_t* tokens_left;     // [S]
  int32_t* finished;        // [S]
  int64_t* step;            // [1]
  int64_t* output_ring;     // [ring_size, S, 3 + C]
  int32_t* token_counts;    // [S, V] or null
  int64_t counts_stride;
  int64_t num_counted;  // V
};

namespace cpu {
void advance(const AdvanceParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_advance(const AdvanceParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
