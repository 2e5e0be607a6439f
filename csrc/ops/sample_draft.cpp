// SPDX-License-Identifier: Apache-2.0
#include "sample_checks.h"

namespace dflash {
namespace {

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
  STD_TORCH_CHECK(vocab_size >= 1 && vocab_size <= logits.size(1), "vocab_size: expected 1 to ",
                  logits.size(1), " (the columns of logits), got ", vocab_size);
  SampleDraftParams params = sampled_rows(
      logits, sample_positions, "sample_positions", sample_idx_mapping, "sample_idx_mapping",
      std::nullopt, temperatures, seeds, vocab_size, d2t, first_column, draft_tokens,
      "draft_tokens");
  if (draft_logits.has_value()) {
    check_draft_logits(*draft_logits, draft_tokens, vocab_size, d2t.has_value());
    params.draft_logits = draft_logits->data_ptr();
    params.target_vocab_size = draft_logits->size(2);
    params.draft_logits_strides[0] = draft_logits->stride(0);
    params.draft_logits_strides[1] = draft_logits->stride(1);
    params.draft_logits_dtype = to_dtype(*draft_logits);
  }
  if (!has_rows(params, draft_tokens, "draft_tokens")) return;
  sample_logits(logits, static_cast<float>(logit_scale), params);
}

}  // namespace dflash

DFLASH_REGISTER(sample_draft)
