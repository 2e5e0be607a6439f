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

struct SampleDraftParams {
  const void* logits;                 // [num_rows, >= vocab_size]
  const int64_t* sample_positions;    // [num_rows] of what is sampled; verified: of what is read
  const int32_t* sample_idx_mapping;  // [num_rows] -> state row, -1 = padded; verified: [num_reqs]
  const int32_t* logits_start_loc;    // [num_reqs + 1]: the rows are verified ones; or null
  const float* temperatures;          // [num_states] or null: argmax
  const int64_t* seeds;               // [num_states]
  const int64_t* d2t;                 // [vocab_size] or null
  int64_t* draft_tokens;              // [num_states, num_drafts]; verified: [num_rows]
  void* draft_logits;                 // [num_states, num_drafts, target_vocab_size] or null
  void* scratch;                      // sample_draft_scratch_size bytes, CUDA only
  int64_t num_rows;
  int64_t num_reqs;
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
  float temperature, inv_temperature;
  NoiseKey noise;
};

// The state row of the request that a verified row belongs to.
DFLASH_HOST_DEVICE int64_t verified_state(const SampleDraftParams& p, int64_t row) {
  int64_t first = 0, last = p.num_reqs;  // the last request that starts at or before the row
  while (last - first > 1) {
    const int64_t middle = (first + last) / 2;
    if (p.logits_start_loc[middle] <= row) first = middle;
    else last = middle;
  }
  const bool is_in = row >= p.logits_start_loc[first] && row < p.logits_start_loc[first + 1];
  return is_in ? p.sample_idx_mapping[first] : -1;
}

DFLASH_HOST_DEVICE DraftRow draft_row(const SampleDraftParams& p, int64_t row) {
  const bool is_verified = p.logits_start_loc != nullptr;
  DraftRow r{is_verified ? verified_state(p, row) : p.sample_idx_mapping[row],
             is_verified ? 0 : static_cast<int>(row % p.num_drafts),
             true, 1.0f, 1.0f, {}};
  if (r.state < 0 || r.state >= p.num_states) r.state = -1;
  if (r.state < 0 || p.temperatures == nullptr) return r;
  const float temperature = p.temperatures[r.state];
  r.greedy = is_greedy(temperature);
  if (r.greedy) return r;
  r.temperature = temperature;
  r.inv_temperature = 1.0f / temperature;
  if (is_verified) {
    r.noise = target_noise(p.seeds[r.state], p.sample_positions[row] + 1);
    return r;
  }
  const int offset = static_cast<int>(p.first_column) + r.column;
  r.noise = block_noise(Stream::kDraft, p.seeds[r.state], p.sample_positions[row] - (offset + 1),
                        offset);
  return r;
}

// What a clean logit and its noise word are worth in a race. A draft's logit is multiplied, as
// rejection_sample reads the record; a verified one is divided, as process_logits does it.
DFLASH_HOST_DEVICE float race_score(bool is_verified, float temperature, float inv_temperature,
                                    float logit, uint32_t word) {
  const float scaled = is_verified ? clean_logit(logit / temperature) : logit * inv_temperature;
  return scaled + gumbel_from_word(word);
}

// Where the row's token goes.
DFLASH_HOST_DEVICE int64_t* token_of(const SampleDraftParams& p, const DraftRow& r, int64_t row) {
  if (p.logits_start_loc != nullptr) return p.draft_tokens + row;
  return p.draft_tokens + r.state * p.draft_tokens_stride + r.column;
}

DFLASH_HOST_DEVICE int64_t target_id(const SampleDraftParams& p, int64_t k) {
  return p.d2t == nullptr ? k : k + p.d2t[k];
}

// Noise words of four neighbouring columns; `column` is a multiple of 4.
DFLASH_HOST_DEVICE Philox4 target_words(const SampleDraftParams& p, const NoiseKey& noise,
                                        int64_t column) {
  if (p.d2t == nullptr) return stream_words(noise, static_cast<uint32_t>(column / 4));
  Philox4 words{};
  for (int k = 0; k < 4 && column + k < p.vocab_size; ++k)
    words.x[k] = stream_word(noise, target_id(p, column + k));
  return words;
}

namespace cpu {
void sample_draft(const SampleDraftParams& params);
}

#ifdef DFLASH_CUDA
int64_t sample_draft_scratch_size(const SampleDraftParams& params);
cudaError_t launch_sample_draft(const SampleDraftParams& params, cudaStream_t stream);

// The tokens of rows whose maxima are keys [num_rows, keys_per_row] (common/argmax.h).
cudaError_t launch_finish_sample(const SampleDraftParams& params, const uint64_t* keys,
                                 int64_t keys_per_row, cudaStream_t stream);
#endif

}  // namespace dflash
