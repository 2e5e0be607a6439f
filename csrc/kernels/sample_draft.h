// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/acceptance.h"
#include "common/dtype.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct SampleDraftParams {
  const void* logits;                 // [num_rows, >= vocab_size]
  const int64_t* sample_positions;    // [num_rows]
  const int32_t* sample_idx_mapping;  // [num_rows] -> state row, -1 = padded
  const float* temperatures;          // [num_states] or null: argmax
  const int64_t* seeds;               // [num_states]
  const int64_t* d2t;                 // [vocab_size] or null
  int64_t* draft_tokens;              // [num_states, num_drafts]
  void* draft_logits;                 // [num_states, num_drafts, target_vocab_size] or null
  void* scratch;                      // sample_draft_scratch_size bytes, CUDA only
  int64_t num_rows;
  int64_t num_states;
  int64_t num_drafts;
  int64_t first_column;  // of the block: what column 0 of draft_tokens and draft_logits is there
  int64_t vocab_size;
  int64_t target_vocab_size;
  int64_t logits_stride;
  int64_t draft_tokens_stride;
  int64_t draft_logits_strides[2];
  float logit_scale;
  DType dtype;
  DType draft_logits_dtype;
};

// What one row samples from.
struct DraftRow {
  int64_t state;  // -1: nothing
  int column;     // of draft_tokens
  bool greedy;
  float inv_temperature;
  NoiseKey noise;
};

DFLASH_HOST_DEVICE DraftRow draft_row(const SampleDraftParams& p, int64_t row) {
  DraftRow r{p.sample_idx_mapping[row], static_cast<int>(row % p.num_drafts), true, 1.0f, {}};
  if (r.state < 0 || r.state >= p.num_states) r.state = -1;
  if (r.state < 0 || p.temperatures == nullptr) return r;
  const float temperature = p.temperatures[r.state];
  r.greedy = is_greedy(temperature);
  if (r.greedy) return r;
  r.inv_temperature = 1.0f / temperature;
  const int offset = static_cast<int>(p.first_column) + r.column;
  r.noise = block_noise(Stream::kDraft, p.seeds[r.state], p.sample_positions[row] - (offset + 1),
                        offset);
  return r;
}

DFLASH_HOST_DEVICE int64_t target_id(const SampleDraftParams& p, int64_t k) {
  return p.d2t == nullptr ? k : k + p.d2t[k];
}

namespace cpu {
void sample_draft(const SampleDraftParams& params);
}

#ifdef DFLASH_CUDA
int64_t sample_draft_scratch_size(const SampleDraftParams& params);
cudaError_t launch_sample_draft(const SampleDraftParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
