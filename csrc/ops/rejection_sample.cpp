// SPDX-License-Identifier: Apache-2.0
#include "kernels/rejection_sample.h"

#include "torch_utils.h"

namespace dflash {
namespace {

RejectionMethod to_method(const std::string& name) {
  if (name == "match") return RejectionMethod::kMatch;
  if (name == "standard") return RejectionMethod::kStandard;
  if (name == "block") return RejectionMethod::kBlock;
  if (name == "synthetic") return RejectionMethod::kSynthetic;
  STD_TORCH_CHECK(false, "method: expected match, standard, block or synthetic, got ", name);
  return RejectionMethod::kMatch;
}

void fill_target_logits(const Tensor& target_logits, int64_t vocab_size,
                        RejectionSampleParams& params) {
  check_shape(target_logits, "target_logits", {-1, -1});
  check_floating(target_logits, "target_logits");
  check_last_dim_contiguous(target_logits, "target_logits");
  STD_TORCH_CHECK(vocab_size >= 1 && vocab_size <= target_logits.size(1),
                  "vocab_size: expected 1 to ", target_logits.size(1),
                  " (the columns of target_logits), got ", vocab_size);
  params.target_logits = target_logits.data_ptr();
  params.target_logits_stride = target_logits.stride(0);
  params.target_dtype = to_dtype(target_logits);
}

void fill_target_tokens(const Tensor& target_tokens, int64_t vocab_size,
                        RejectionSampleParams& params) {
  check_tensor(target_tokens, "target_tokens", {-1}, ScalarType::Long, target_tokens);
  STD_TORCH_CHECK(vocab_size >= 1, "vocab_size: expected at least 1, got ", vocab_size);
  STD_TORCH_CHECK(
      params.method == RejectionMethod::kMatch || params.method == RejectionMethod::kSynthetic,
      "target_tokens: for methods match and synthetic; standard and block need target_logits");
  params.target_tokens = data_ptr<int64_t>(target_tokens);
}

void fill_draft_logits(const Tensor& draft_logits, int64_t num_states, const Tensor& like,
                       RejectionSampleParams& params) {
  check_shape(draft_logits, "draft_logits", {num_states, params.max_drafts, -1});
  check_floating(draft_logits, "draft_logits");
  check_last_dim_contiguous(draft_logits, "draft_logits");
  check_same_device(draft_logits, "draft_logits", like);
  STD_TORCH_CHECK(draft_logits.size(2) >= params.vocab_size,
                  "draft_logits: expected at least vocab_size = ", params.vocab_size,
                  " columns, got ", draft_logits.size(2));
  params.draft_logits = draft_logits.data_ptr();
  params.draft_logits_strides[0] = draft_logits.stride(0);
  params.draft_logits_strides[1] = draft_logits.stride(1);
  params.draft_dtype = to_dtype(draft_logits);
}

// [num_states, K], or [K] for every request alike.
void fill_stop_token_ids(const Tensor& stop_token_ids, int64_t num_states, const Tensor& like,
                         RejectionSampleParams& params) {
  const bool per_state = stop_token_ids.dim() != 1;
  if (per_state) check_shape(stop_token_ids, "stop_token_ids", {num_states, -1});
  check_dtype(stop_token_ids, "stop_token_ids", ScalarType::Long);
  check_last_dim_contiguous(stop_token_ids, "stop_token_ids");
  check_same_device(stop_token_ids, "stop_token_ids", like);
  params.stop_token_ids = data_ptr<int64_t>(stop_token_ids);
  params.num_stop_ids = static_cast<int>(stop_token_ids.size(per_state ? 1 : 0));
  params.stop_token_ids_stride = per_state ? stop_token_ids.stride(0) : 0;
}

void fill_synthetic_rates(const std::optional<Tensor>& synthetic_rates, const Tensor& like,
                          RejectionSampleParams& params) {
  if (params.method != RejectionMethod::kSynthetic) return;
  STD_TORCH_CHECK(synthetic_rates.has_value(), "synthetic_rates: required by method synthetic");
  check_tensor(*synthetic_rates, "synthetic_rates", {-1}, ScalarType::Float, like);
  STD_TORCH_CHECK(synthetic_rates->size(0) >= params.max_drafts,
                  "synthetic_rates: expected at least ", params.max_drafts,
                  " rates (the columns of draft_tokens), got ", synthetic_rates->size(0));
  params.synthetic_rates = data_ptr<float>(*synthetic_rates);
}

}  // namespace

void rejection_sample(const std::optional<Tensor>& target_logits,
                      const std::optional<Tensor>& target_tokens, const Tensor& logits_start_loc,
                      const Tensor& logits_positions, const Tensor& idx_mapping,
                      const Tensor& draft_tokens, const Tensor& num_draft_tokens,
                      const std::optional<Tensor>& draft_logits, const Tensor& temperatures,
                      const Tensor& seeds, const Tensor& tokens_left,
                      const std::optional<Tensor>& stop_token_ids, std::string method,
                      int64_t vocab_size, const std::optional<Tensor>& synthetic_rates,
                      Tensor sampled_token_ids, Tensor num_sampled, Tensor num_rejected) {
  STD_TORCH_CHECK(target_logits.has_value() != target_tokens.has_value(),
                  "target_logits, target_tokens: expected one of the two");
  RejectionSampleParams params{};
  params.method = to_method(method);
  if (target_logits.has_value()) fill_target_logits(*target_logits, vocab_size, params);
  else fill_target_tokens(*target_tokens, vocab_size, params);
  const Tensor& target = target_logits.has_value() ? *target_logits : *target_tokens;
  check_shape(idx_mapping, "idx_mapping", {-1});
  check_shape(draft_tokens, "draft_tokens", {-1, -1});
  const int64_t num_reqs = idx_mapping.size(0);
  const int64_t num_states = draft_tokens.size(0);
  const int64_t max_drafts = draft_tokens.size(1);
  check_tensor(logits_start_loc, "logits_start_loc", {num_reqs + 1}, ScalarType::Int, target);
  check_tensor(logits_positions, "logits_positions", {target.size(0)}, ScalarType::Long, target);
  check_tensor(idx_mapping, "idx_mapping", {num_reqs}, ScalarType::Int, target);
  check_tensor(draft_tokens, "draft_tokens", {num_states, max_drafts}, ScalarType::Long, target);
  check_tensor(num_draft_tokens, "num_draft_tokens", {num_states}, ScalarType::Int, target);
  check_tensor(temperatures, "temperatures", {num_states}, ScalarType::Float, target);
  check_tensor(seeds, "seeds", {num_states}, ScalarType::Long, target);
  check_tensor(tokens_left, "tokens_left", {num_states}, ScalarType::Int, target);
  check_tensor(sampled_token_ids, "sampled_token_ids", {num_reqs, max_drafts + 1}, ScalarType::Long,
               target);
  check_tensor(num_sampled, "num_sampled", {num_reqs}, ScalarType::Int, target);
  check_tensor(num_rejected, "num_rejected", {num_reqs}, ScalarType::Int, target);

  params.logits_start_loc = data_ptr<int32_t>(logits_start_loc);
  params.logits_positions = data_ptr<int64_t>(logits_positions);
  params.idx_mapping = data_ptr<int32_t>(idx_mapping);
  params.draft_tokens = data_ptr<int64_t>(draft_tokens);
  params.num_draft_tokens = data_ptr<int32_t>(num_draft_tokens);
  params.temperatures = data_ptr<float>(temperatures);
  params.seeds = data_ptr<int64_t>(seeds);
  params.tokens_left = data_ptr<int32_t>(tokens_left);
  params.sampled_token_ids = data_ptr<int64_t>(sampled_token_ids);
  params.num_sampled = data_ptr<int32_t>(num_sampled);
  params.num_rejected = data_ptr<int32_t>(num_rejected);
  params.num_reqs = num_reqs;
  params.num_states = num_states;
  params.vocab_size = vocab_size;
  params.draft_tokens_stride = draft_tokens.stride(0);
  params.sampled_token_ids_stride = sampled_token_ids.stride(0);
  params.max_drafts = static_cast<int>(max_drafts);
  if (draft_logits.has_value()) fill_draft_logits(*draft_logits, num_states, target, params);
  if (stop_token_ids.has_value()) fill_stop_token_ids(*stop_token_ids, num_states, target, params);
  fill_synthetic_rates(synthetic_rates, target, params);
  if (num_reqs == 0) return;
#ifdef DFLASH_CUDA
  const Tensor scratch =
      torch::stable::new_empty(target, {rejection_sample_scratch_size(params)}, ScalarType::Byte);
  params.scratch = scratch.data_ptr();
#endif
  DFLASH_LAUNCH(rejection_sample, params, target);
}

}  // namespace dflash

DFLASH_REGISTER(rejection_sample)
