// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/slots.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct BuildVerifyParams {
  const int32_t* idx_mapping;   // [R]
  const int32_t* seq_lens;      // [S]
  const int64_t* last_sampled;  // [S]
  const int64_t* draft_tokens;  // [S, N]
  int64_t draft_tokens_stride;
  BlockTable block_table;  // [R, columns]
  int32_t num_reqs;        // R
  int32_t rows_per_req;    // Q = N + 1
  int32_t max_model_len;
  int64_t* input_ids;        // [R * Q]
  int64_t* positions;        // [R * Q]
  int64_t* slot_mapping;     // [R * Q]
  int32_t* query_seq_lens;   // [R]
  int32_t* query_start_loc;  // [R + 1]
};

namespace cpu {
void build_verify(const BuildVerifyParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_build_verify(const BuildVerifyParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
