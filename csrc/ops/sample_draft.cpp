// SPDX-License-Identifier: Apache-2.0
#include "kernels/sample_draft.h"

#include "torch_utils.h"

namespace dflash {
namespace {

constexpr int64_t kMaxColumns = 1 << 16;  // of a block; the noise has 24 bits for the offset

void check_vocabulary(const Tensor& logits, const std::optional<Tensor>& d2t, int64_t vocab_size) {
  STD_TORCH_CHECK(vocab_size >= 1 && vocab_size <= logits.size(1), "vocab_size: expected 1 to ",
                  logits.size(1), " (the columns of logits), got ", vocab_size);
  if (!d2t.has_value()) return;
  check_tensor(*d2t, "d2t", {vocab_size}, ScalarType::Long, logits);
}

void check_draft_logits(const Tensor& draft_logits, const Tensor& draft_tokens, int64_t vocab_size,
                        bool has_d2t) {
  check_shape(draft_logits, "draft_logits", {draft_tokens.size(0), draft_tokens.size(1), -1});
  check_floating(draft_logits, "draft_logits");
  check_last_dim_contiguous(draft_logits, "draft_logits");
  check_same_device(draft_logits, "draft_logits", draft_tokens);
  STD_TORCH_CHECK(has_d2t || draft_logits.size(2) >= vocab_size,
                  "draft_logits: expected at least vocab_size = ", vocab_size,
                  " columns without d2t, got ", draft_logits.size(2));
}

}  // namespace

void sample_draft(const Tensor& logits, const Tensor& sample_positions,
                  const Tensor& sample_idx_mapping, const std::optional<Tensor>& temperatures,
                  const std::optional<Tensor>& seeds, int64_t vocab_size, double logit_scale,
                  const std::optional<Tensor>& d2t, int64_t first_column, Tensor draft_tokens,
                  std::optional<Tensor> draft_logits) {
  check_shape(logits, "logits", {-1, -1});
  check_floating(logits, "logits");
  check_last_dim_contiguous(logits, "logits");
  check_vocabulary(logits, d2t, vocab_size);
  const int64_t num_rows = logits.size(0);
  check_tensor(sample_positions, "sample_positions", {num_rows}, ScalarType::Long, logits);
  check_tensor(sample_idx_mapping, "sample_idx_mapping", {num_rows}, ScalarType::Int, logits);
  check_tensor(draft_tokens, "draft_tokens", {-1, -1}, ScalarType::Long, logits);
  const int64_t num_states = draft_tokens.size(0);
  const int64_t num_drafts = draft_tokens.size(1);
  if (temperatures.has_value()) {
    check_tensor(*temperatures, "temperatures", {num_states}, ScalarType::Float, logits);
    STD_TORCH_CHECK(seeds.has_value(), "seeds: required with temperatures");
    check_tensor(*seeds, "seeds", {num_states}, ScalarType::Long, logits);
  }
  STD_TORCH_CHECK(first_column >= 0 && first_column < kMaxColumns, "first_column: expected 0 to ",
                  kMaxColumns - 1, ", got ", first_column);
  if (draft_logits.has_value())
    check_draft_logits(*draft_logits, draft_tokens, vocab_size, d2t.has_value());
  if (num_rows == 0 || draft_tokens.size(0) == 0) return;
  STD_TORCH_CHECK(num_drafts >= 1, "draft_tokens: expected at least one column, got ",
                  shape_string(draft_tokens));

  SampleDraftParams params{};
  params.logits = logits.data_ptr();
  params.sample_positions = data_ptr<int64_t>(sample_positions);
  params.sample_idx_mapping = data_ptr<int32_t>(sample_idx_mapping);
  params.temperatures = data_ptr<float>(temperatures);
  params.seeds = data_ptr<int64_t>(seeds);
  params.d2t = data_ptr<int64_t>(d2t);
  params.draft_tokens = data_ptr<int64_t>(draft_tokens);
  params.num_rows = num_rows;
  params.num_states = num_states;
  params.num_drafts = num_drafts;
  params.first_column = first_column;
  params.vocab_size = vocab_size;
  params.logits_stride = logits.stride(0);
  params.draft_tokens_stride = draft_tokens.stride(0);
  params.logit_scale = static_cast<float>(logit_scale);
  params.dtype = to_dtype(logits);
  if (draft_logits.has_value()) {
    params.draft_logits = draft_logits->data_ptr();
    params.target_vocab_size = draft_logits->size(2);
    params.draft_logits_strides[0] = draft_logits->stride(0);
    params.draft_logits_strides[1] = draft_logits->stride(1);
    params.draft_logits_dtype = to_dtype(*draft_logits);
  }
#ifdef DFLASH_CUDA
  const Tensor scratch =
      torch::stable::new_empty(logits, {sample_draft_scratch_size(params)}, ScalarType::Byte);
  params.scratch = scratch.data_ptr();
#endif
  DFLASH_LAUNCH(sample_draft, params, logits);
}

}  // namespace dflash

DFLASH_REGISTER(sample_draft)
