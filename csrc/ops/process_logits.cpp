// SPDX-License-Identifier: Apache-2.0
#include "kernels/process_logits.h"

#include "torch_utils.h"

namespace dflash {
namespace {

using OptionalTensor = std::optional<Tensor>;

// An optional [num_states] parameter.
template <typename T>
const T* state_values(const OptionalTensor& t, const char* name, ScalarType dtype,
                      const Tensor& temperatures) {
  if (!t.has_value()) return nullptr;
  check_tensor(*t, name, {temperatures.size(0)}, dtype, temperatures);
  return data_ptr<const T>(t);
}

void check_columns(const Tensor& t, const char* name, int64_t vocab_size) {
  STD_TORCH_CHECK(t.size(1) >= vocab_size, name, ": expected at least vocab_size = ", vocab_size,
                  " columns, got ", t.size(1));
}

void check_rows(const Tensor& logits, const Tensor& output, int64_t vocab_size) {
  check_shape(logits, "logits", {-1, -1});
  check_floating(logits, "logits");
  check_last_dim_contiguous(logits, "logits");
  STD_TORCH_CHECK(vocab_size >= 1 && vocab_size <= logits.size(1), "vocab_size: expected 1 to ",
                  logits.size(1), " (the columns of logits), got ", vocab_size);
  check_tensor(output, "output", {logits.size(0), -1}, ScalarType::Float, logits);
  check_columns(output, "output", vocab_size);
}

void fill_penalties(const OptionalTensor& repetition_penalties,
                    const OptionalTensor& frequency_penalties,
                    const OptionalTensor& presence_penalties, const OptionalTensor& token_counts,
                    const Tensor& temperatures, ProcessLogitsParams& p) {
  p.repetition_penalties = state_values<float>(repetition_penalties, "repetition_penalties",
                                               ScalarType::Float, temperatures);
  p.frequency_penalties = state_values<float>(frequency_penalties, "frequency_penalties",
                                              ScalarType::Float, temperatures);
  p.presence_penalties = state_values<float>(presence_penalties, "presence_penalties",
                                             ScalarType::Float, temperatures);
  const bool penalizes = repetition_penalties.has_value() || frequency_penalties.has_value() ||
                         presence_penalties.has_value();
  STD_TORCH_CHECK(!penalizes || token_counts.has_value(), "token_counts: required by penalties");
  if (!token_counts.has_value()) return;
  check_tensor(*token_counts, "token_counts", {temperatures.size(0), -1}, ScalarType::Int,
               temperatures);
  check_columns(*token_counts, "token_counts", p.vocab_size);
  if (!penalizes) return;
  p.token_counts = data_ptr<int32_t>(token_counts);
  p.token_counts_stride = token_counts->stride(0);
}

void fill_bias(const OptionalTensor& ids, const OptionalTensor& bias, const Tensor& temperatures,
               ProcessLogitsParams& p) {
  STD_TORCH_CHECK(ids.has_value() == bias.has_value(),
                  "logit_bias: expected together with logit_bias_ids");
  if (!ids.has_value()) return;
  check_tensor(*ids, "logit_bias_ids", {temperatures.size(0), -1}, ScalarType::Long, temperatures);
  check_tensor(*bias, "logit_bias", {temperatures.size(0), ids->size(1)}, ScalarType::Float,
               temperatures);
  p.logit_bias_ids = data_ptr<int64_t>(ids);
  p.logit_bias = data_ptr<float>(bias);
  p.logit_bias_ids_stride = ids->stride(0);
  p.logit_bias_stride = bias->stride(0);
  p.num_bias = static_cast<int>(ids->size(1));
}

void fill_min_seq_lens(const OptionalTensor& min_seq_lens, const OptionalTensor& stop_token_ids,
                       const Tensor& temperatures, ProcessLogitsParams& p) {
  if (stop_token_ids.has_value()) {
    check_tensor(*stop_token_ids, "stop_token_ids", {temperatures.size(0), -1}, ScalarType::Long,
                 temperatures);
  }
  if (!min_seq_lens.has_value()) return;
  STD_TORCH_CHECK(stop_token_ids.has_value(), "stop_token_ids: required by min_seq_lens");
  p.min_seq_lens =
      state_values<int64_t>(min_seq_lens, "min_seq_lens", ScalarType::Long, temperatures);
  p.stop_token_ids = data_ptr<int64_t>(stop_token_ids);
  p.stop_token_ids_stride = stop_token_ids->stride(0);
  p.num_stop_ids = static_cast<int>(stop_token_ids->size(1));
}

}  // namespace

void process_logits(const Tensor& logits, const Tensor& logits_start_loc,
                    const Tensor& logits_positions, const Tensor& idx_mapping,
                    const Tensor& draft_tokens, const Tensor& temperatures,
                    const OptionalTensor& top_ks, const OptionalTensor& top_ps,
                    const OptionalTensor& min_ps, const OptionalTensor& repetition_penalties,
                    const OptionalTensor& frequency_penalties,
                    const OptionalTensor& presence_penalties, const OptionalTensor& token_counts,
                    const OptionalTensor& logit_bias_ids, const OptionalTensor& logit_bias,
                    const OptionalTensor& min_seq_lens, const OptionalTensor& stop_token_ids,
                    int64_t vocab_size, Tensor output) {
  check_rows(logits, output, vocab_size);
  check_tensor(idx_mapping, "idx_mapping", {-1}, ScalarType::Int, logits);
  const int64_t num_reqs = idx_mapping.size(0);
  check_tensor(logits_start_loc, "logits_start_loc", {num_reqs + 1}, ScalarType::Int, logits);
  check_tensor(logits_positions, "logits_positions", {logits.size(0)}, ScalarType::Long, logits);
  check_tensor(temperatures, "temperatures", {-1}, ScalarType::Float, logits);
  const int64_t num_states = temperatures.size(0);
  check_tensor(draft_tokens, "draft_tokens", {num_states, -1}, ScalarType::Long, logits);

  ProcessLogitsParams params{};
  params.logits = logits.data_ptr();
  params.logits_start_loc = data_ptr<int32_t>(logits_start_loc);
  params.logits_positions = data_ptr<int64_t>(logits_positions);
  params.idx_mapping = data_ptr<int32_t>(idx_mapping);
  params.draft_tokens = data_ptr<int64_t>(draft_tokens);
  params.temperatures = data_ptr<float>(temperatures);
  params.top_ks = state_values<int32_t>(top_ks, "top_ks", ScalarType::Int, temperatures);
  params.top_ps = state_values<float>(top_ps, "top_ps", ScalarType::Float, temperatures);
  params.min_ps = state_values<float>(min_ps, "min_ps", ScalarType::Float, temperatures);
  params.output = data_ptr<float>(output);
  params.num_rows = logits.size(0);
  params.num_reqs = num_reqs;
  params.num_states = num_states;
  params.vocab_size = vocab_size;
  params.logits_stride = logits.stride(0);
  params.output_stride = output.stride(0);
  params.draft_tokens_stride = draft_tokens.stride(0);
  params.max_drafts = static_cast<int>(draft_tokens.size(1));
  params.dtype = to_dtype(logits);
  fill_penalties(repetition_penalties, frequency_penalties, presence_penalties, token_counts,
                 temperatures, params);
  fill_bias(logit_bias_ids, logit_bias, temperatures, params);
  fill_min_seq_lens(min_seq_lens, stop_token_ids, temperatures, params);
  if (params.num_rows == 0 || num_reqs == 0) return;
  DFLASH_LAUNCH(process_logits, params, logits);
}

}  // namespace dflash

DFLASH_REGISTER(process_logits)
