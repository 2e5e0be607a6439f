// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/acceptance.h"
#include "common/dtype.h"
#include "common/logits.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct RejectionSampleParams {
  const void* target_logits;        // [num_logits_rows, >= vocab_size] or null: target_tokens
  const int64_t* target_tokens;     // [num_logits_rows]: what every row samples; or null
  const int32_t* logits_start_loc;  // [num_reqs + 1]
  const int64_t* logits_positions;  // [num_logits_rows]
  const int32_t* idx_mapping;       // [num_reqs] -> state row, -1 = padded
  const int64_t* draft_tokens;      // [num_states, max_drafts]
  const int32_t* num_draft_tokens;  // [num_states]
  const void* draft_logits;         // [num_states, max_drafts, >= vocab_size] or null: one-hot
  const float* temperatures;        // [num_states]
  const int64_t* seeds;             // [num_states]
  const int32_t* tokens_left;       // [num_states]
  const int64_t* stop_token_ids;  // [num_states, num_stop_ids] or [num_stop_ids] (stride 0) or null
  const float* synthetic_rates;   // [max_drafts], method synthetic
  int64_t* sampled_token_ids;     // [num_reqs, max_drafts + 1]
  int32_t* num_sampled;           // [num_reqs]
  int32_t* num_rejected;          // [num_reqs]
  void* scratch;                  // rejection_sample_scratch_size bytes, CUDA only
  int64_t num_reqs;
  int64_t num_states;
  int64_t vocab_size;
  int64_t target_logits_stride;
  int64_t draft_tokens_stride;
  int64_t draft_logits_strides[2];
  int64_t stop_token_ids_stride;
  int64_t sampled_token_ids_stride;
  int max_drafts;
  int num_stop_ids;
  RejectionMethod method;
  DType target_dtype;
  DType draft_dtype;
};

// One request of the batch.
struct VerifiedRequest {
  int64_t state;  // -1: padded
  int64_t first_row;
  int num_rows;    // 0: nothing is sampled
  int num_drafts;  // before ids that are no tokens are looked for
  float temperature;
  int64_t seed;
  int64_t anchor;  // position of the first row
  const int64_t* drafts;

  DFLASH_HOST_DEVICE bool sampled() const { return !is_greedy(temperature); }
};

DFLASH_HOST_DEVICE int clamp_drafts(int num_draft_tokens, int num_rows, int max_drafts) {
  int n = num_draft_tokens < num_rows - 1 ? num_draft_tokens : num_rows - 1;
  n = n < max_drafts ? n : max_drafts;
  return n > 0 ? n : 0;
}

DFLASH_HOST_DEVICE VerifiedRequest verified_request(const RejectionSampleParams& p, int64_t req) {
  VerifiedRequest r{};
  r.state = p.idx_mapping[req];
  r.first_row = p.logits_start_loc[req];
  r.num_rows = p.logits_start_loc[req + 1] - static_cast<int>(r.first_row);
  if (r.state < 0 || r.state >= p.num_states) {
    r.state = -1;
    r.num_rows = 0;
  }
  if (r.num_rows <= 0) return r;
  r.num_drafts = clamp_drafts(p.num_draft_tokens[r.state], r.num_rows, p.max_drafts);
  r.temperature = p.temperatures[r.state];
  r.seed = p.seeds[r.state];
  r.anchor = p.logits_positions[r.first_row];
  r.drafts = p.draft_tokens + r.state * p.draft_tokens_stride;
  return r;
}

DFLASH_HOST_DEVICE LogitsRow target_row(const RejectionSampleParams& p, const VerifiedRequest& r,
                                        int i) {
  return LogitsRow{
      element(p.target_logits, p.target_dtype, (r.first_row + i) * p.target_logits_stride),
      p.target_dtype, 1.0f};
}

DFLASH_HOST_DEVICE LogitsRow drafter_row(const RejectionSampleParams& p, const VerifiedRequest& r,
                                         int i) {
  const int64_t offset = r.state * p.draft_logits_strides[0] + i * p.draft_logits_strides[1];
  return LogitsRow{element(p.draft_logits, p.draft_dtype, offset), p.draft_dtype,
                   1.0f / r.temperature};
}

DFLASH_HOST_DEVICE NoiseKey row_noise(const RejectionSampleParams& p, const VerifiedRequest& r,
                                      int i) {
  return target_noise(r.seed, p.logits_positions[r.first_row + i] + 1);
}

DFLASH_HOST_DEVICE float acceptance_uniform(const VerifiedRequest& r, int i) {
  return stream_uniform(block_noise(Stream::kAcceptance, r.seed, r.anchor, i));
}

DFLASH_HOST_DEVICE bool is_stop_token(const RejectionSampleParams& p, int64_t state,
                                      int64_t token) {
  const int64_t* ids = p.stop_token_ids + state * p.stop_token_ids_stride;
  for (int k = 0; k < p.num_stop_ids; ++k) {
    if (ids[k] == token) return true;
  }
  return false;
}

// How many of the accepted drafts and the token after them may be committed, stop ids aside.
DFLASH_HOST_DEVICE int commit_limit(const RejectionSampleParams& p, const VerifiedRequest& r,
                                    int accepted) {
  if (r.num_rows <= 0) return 0;
  const int left = p.tokens_left[r.state] > 0 ? p.tokens_left[r.state] : 0;
  return accepted + 1 < left ? accepted + 1 : left;
}

namespace cpu {
void rejection_sample(const RejectionSampleParams& params);
}

#ifdef DFLASH_CUDA
int64_t rejection_sample_scratch_size(const RejectionSampleParams& params);
cudaError_t launch_rejection_sample(const RejectionSampleParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
