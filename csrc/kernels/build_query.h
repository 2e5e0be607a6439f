// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/slots.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

// K/V groups of one launch: the parameters are passed by value.
constexpr int kMaxKvGroups = 8;

struct KvGroup {
  BlockTable block_table;         // [R, columns]
  int64_t* context_slot_mapping;  // [T]
  int64_t* query_slot_mapping;    // [P * num_query_per_req]
};

// Token ids as their owner keeps them.
struct TokenIds {
  void* data;  // int64, or int32
  bool is_int32;
};

struct BuildQueryParams {
  const int64_t* target_positions;     // [T]
  const int32_t* query_start_loc;      // [R + 1]
  const int32_t* num_sampled;          // [R]
  const int32_t* num_rejected;         // [R]
  const int64_t* last_sampled;         // [S]
  TokenIds next_prefill_tokens;        // [S]
  const int32_t* idx_mapping;          // [R]
  int32_t num_context_rows;            // T
  int32_t num_reqs;                    // R
  int32_t num_output_reqs;             // P >= R: the outputs' requests, padded from R on
  int32_t num_speculative_tokens;      // N
  int32_t num_query_per_req;           // N + 1, or N with sample_from_anchor
  int64_t mask_token_id;
  int32_t max_model_len;
  bool sample_from_anchor;
  int32_t num_groups;
  KvGroup groups[kMaxKvGroups];
  int64_t* context_positions;      // [T]
  TokenIds query_input_ids;        // [P * num_query_per_req]
  int64_t* query_positions;        // [P * num_query_per_req]
  int32_t* query_seq_lens;         // [P]
  int32_t* draft_query_start_loc;  // [P + 1]
  int64_t* sample_rows;            // [P * N]
  int64_t* sample_positions;       // [P * N]
  int32_t* sample_idx_mapping;     // [P * N]
};

namespace cpu {
void build_query(const BuildQueryParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_build_query(const BuildQueryParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
