// SPDX-License-Identifier: Apache-2.0
// What the ops that sample rows share: whose rows they are and how each is sampled.
#pragma once

#include "kernels/sample_draft.h"
#include "torch_utils.h"

namespace dflash {

inline constexpr int64_t kMaxColumns = 1 << 16;  // of a block; the noise has 24 bits for the offset

// Draft rows, or with logits_start_loc verified ones. `rows` are what is sampled from: its device
// and its size are theirs.
inline SampleDraftParams sampled_rows(const Tensor& rows, const Tensor& positions,
                                      const char* positions_name, const Tensor& idx_mapping,
                                      const char* idx_mapping_name,
                                      const std::optional<Tensor>& logits_start_loc,
                                      const std::optional<Tensor>& temperatures,
                                      const std::optional<Tensor>& seeds, int64_t vocab_size,
                                      const std::optional<Tensor>& d2t, int64_t first_column,
                                      const Tensor& tokens, const char* tokens_name) {
  SampleDraftParams params{};
  params.num_rows = rows.size(0);
  const bool is_verified = logits_start_loc.has_value();
  check_tensor(positions, positions_name, {params.num_rows}, ScalarType::Long, rows);
  check_tensor(idx_mapping, idx_mapping_name, {is_verified ? -1 : params.num_rows},
               ScalarType::Int, rows);
  if (is_verified) {
    params.num_reqs = idx_mapping.size(0);
    check_tensor(*logits_start_loc, "logits_start_loc", {params.num_reqs + 1}, ScalarType::Int,
                 rows);
    check_tensor(tokens, tokens_name, {params.num_rows}, ScalarType::Long, rows);
  } else {
    check_tensor(tokens, tokens_name, {-1, -1}, ScalarType::Long, rows);
    params.num_states = tokens.size(0);
    params.num_drafts = tokens.size(1);
    params.draft_tokens_stride = tokens.stride(0);
  }
  if (temperatures.has_value()) {
    // Verified rows name their states here only.
    const int64_t num_states = is_verified ? -1 : params.num_states;
    check_tensor(*temperatures, "temperatures", {num_states}, ScalarType::Float, rows);
    STD_TORCH_CHECK(seeds.has_value(), "seeds: required with temperatures");
    check_tensor(*seeds, "seeds", {temperatures->size(0)}, ScalarType::Long, rows);
  }
  if (is_verified) params.num_states = temperatures.has_value() ? temperatures->size(0) : INT32_MAX;
  if (d2t.has_value()) check_tensor(*d2t, "d2t", {vocab_size}, ScalarType::Long, rows);
  STD_TORCH_CHECK(first_column >= 0 && first_column < kMaxColumns, "first_column: expected 0 to ",
                  kMaxColumns - 1, ", got ", first_column);
  params.sample_positions = data_ptr<int64_t>(positions);
  params.sample_idx_mapping = data_ptr<int32_t>(idx_mapping);
  params.logits_start_loc = data_ptr<int32_t>(logits_start_loc);
  params.temperatures = data_ptr<float>(temperatures);
  params.seeds = data_ptr<int64_t>(seeds);
  params.d2t = data_ptr<int64_t>(d2t);
  params.draft_tokens = data_ptr<int64_t>(tokens);
  params.first_column = first_column;
  params.vocab_size = vocab_size;
  return params;
}

// Whether there is anything to sample.
inline bool has_rows(const SampleDraftParams& params, const Tensor& tokens,
                     const char* tokens_name) {
  if (params.num_rows == 0) return false;
  if (params.logits_start_loc != nullptr) return params.num_reqs > 0;
  if (params.num_states == 0) return false;
  STD_TORCH_CHECK(params.num_drafts >= 1, tokens_name, ": expected at least one column, got ",
                  shape_string(tokens));
  return true;
}

// Logits, and where the kernels leave the maxima.
inline void sample_logits(const Tensor& logits, float logit_scale, SampleDraftParams params) {
  params.logits = logits.data_ptr();
  params.logits_stride = logits.stride(0);
  params.logit_scale = logit_scale;
  params.dtype = to_dtype(logits);
#ifdef DFLASH_CUDA
  const Tensor scratch =
      torch::stable::new_empty(logits, {sample_draft_scratch_size(params)}, ScalarType::Byte);
  params.scratch = scratch.data_ptr();
#endif
  DFLASH_LAUNCH(sample_draft, params, logits);
}

}  // namespace dflash
