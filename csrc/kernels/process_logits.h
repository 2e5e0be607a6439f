// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/logit_rules.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct ProcessLogitsParams {
  const void* logits;                // [num_rows, >= vocab_size]
  const int32_t* logits_start_loc;   // [num_reqs + 1]
  const int64_t* logits_positions;   // [num_rows]
  const int32_t* idx_mapping;        // [num_reqs] -> state row, -1 = padded
  const int64_t* draft_tokens;       // [num_states, max_drafts]
  const float* temperatures;         // [num_states]
  const int32_t* top_ks;             // [num_states] or null, like the next five
  const float* top_ps;
  const float* min_ps;
  const float* repetition_penalties;
  const float* frequency_penalties;
  const float* presence_penalties;
  const int32_t* token_counts;    // [num_states, >= vocab_size]; null: no penalty
  const int64_t* logit_bias_ids;  // [num_states, num_bias]
  const float* logit_bias;        // [num_states, num_bias]
  const int64_t* min_seq_lens;    // [num_states] or null
  const int64_t* stop_token_ids;  // [num_states, num_stop_ids]
  float* output;                  // [num_rows, >= vocab_size]; may be logits
  int64_t num_rows;
  int64_t num_reqs;
  int64_t num_states;
  int64_t vocab_size;
  int64_t logits_stride;
  int64_t output_stride;
  int64_t draft_tokens_stride;
  int64_t token_counts_stride;
  int64_t logit_bias_ids_stride;
  int64_t logit_bias_stride;
  int64_t stop_token_ids_stride;
  int max_drafts;
  int num_bias;
  int num_stop_ids;
  DType dtype;
};

DFLASH_HOST_DEVICE float of_state(const float* values, int64_t state, float absent) {
  return values == nullptr ? absent : values[state];
}

DFLASH_HOST_DEVICE void add_penalties(const ProcessLogitsParams& p, int64_t row_of_request,
                                      LogitRules& r) {
  if (p.token_counts == nullptr) return;
  r.repetition = of_state(p.repetition_penalties, r.state, 1.0f);
  r.frequency = of_state(p.frequency_penalties, r.state, 0.0f);
  r.presence = of_state(p.presence_penalties, r.state, 0.0f);
  if (r.repetition == 1.0f && r.frequency == 0.0f && r.presence == 0.0f) return;
  r.counts = p.token_counts + r.state * p.token_counts_stride;
  r.drafts = p.draft_tokens + r.state * p.draft_tokens_stride;
  r.num_drafts = static_cast<int>(row_of_request < p.max_drafts ? row_of_request : p.max_drafts);
}

DFLASH_HOST_DEVICE void add_selection(const ProcessLogitsParams& p, LogitRules& r) {
  if (is_greedy(r.temperature)) return;
  const int top_k = p.top_ks == nullptr ? 0 : p.top_ks[r.state];
  r.top_k = top_k > 0 && top_k < p.vocab_size ? top_k : 0;
  r.top_p = of_state(p.top_ps, r.state, 1.0f);
  r.min_p = of_state(p.min_ps, r.state, 0.0f);
}

// Of logits row `row`, which belongs to request `req`.
DFLASH_HOST_DEVICE LogitRules logit_rules(const ProcessLogitsParams& p, int64_t row, int64_t req) {
  LogitRules r{};
  r.state = p.idx_mapping[req];
  r.top_p = 1.0f;
  if (r.state < 0 || r.state >= p.num_states) {
    r.state = -1;
    return r;
  }
  r.temperature = p.temperatures[r.state];
  add_penalties(p, row - p.logits_start_loc[req], r);
  if (p.logit_bias_ids != nullptr) {
    r.bias_ids = p.logit_bias_ids + r.state * p.logit_bias_ids_stride;
    r.bias = p.logit_bias + r.state * p.logit_bias_stride;
    r.num_bias = p.num_bias;
  }
  if (p.min_seq_lens != nullptr && p.logits_positions[row] + 1 < p.min_seq_lens[r.state]) {
    r.banned_ids = p.stop_token_ids + r.state * p.stop_token_ids_stride;
    r.num_banned = p.num_stop_ids;
  }
  add_selection(p, r);
  return r;
}

namespace cpu {
void process_logits(const ProcessLogitsParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_process_logits(const ProcessLogitsParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
