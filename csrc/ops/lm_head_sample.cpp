// SPDX-License-Identifier: Apache-2.0
#include "kernels/lm_head_sample.h"

#include "sample_checks.h"

namespace dflash {

void linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, Tensor output);

namespace {

void check_head(const Tensor& hidden_states, const Tensor& weight) {
  check_shape(hidden_states, "hidden_states", {-1, -1});
  check_floating(hidden_states, "hidden_states");
  check_last_dim_contiguous(hidden_states, "hidden_states");
  check_tensor(weight, "weight", {-1, hidden_states.size(1)}, hidden_states.scalar_type(),
               hidden_states);
}

void check_vocab_size(int64_t vocab_size, const Tensor& weight) {
  STD_TORCH_CHECK(vocab_size >= 1 && vocab_size <= weight.size(0), "vocab_size: expected 1 to ",
                  weight.size(0), " (the rows of weight), got ", vocab_size);
}

#ifdef DFLASH_CUDA
gemm::Operands head_operands(const Tensor& hidden_states, const Tensor& weight) {
  return {hidden_states.data_ptr(),
          weight.data_ptr(),
          hidden_states.size(0),
          weight.size(0),
          weight.size(1),
          hidden_states.stride(0),
          weight.stride(0),
          to_dtype(hidden_states)};
}

bool is_fused(const Tensor& hidden_states, const LmHeadSampleParams& params) {
  return device_properties(hidden_states.get_device_index()).major == 9 && can_fuse(params);
}
#endif

}  // namespace

void lm_head_sample(const Tensor& hidden_states, const Tensor& weight, const Tensor& positions,
                    const Tensor& idx_mapping, const std::optional<Tensor>& logits_start_loc,
                    const std::optional<Tensor>& temperatures, const std::optional<Tensor>& seeds,
                    int64_t vocab_size, double logit_scale, const std::optional<Tensor>& d2t,
                    int64_t first_column, Tensor tokens) {
  check_head(hidden_states, weight);
  check_vocab_size(vocab_size, weight);
  SampleDraftParams sample =
      sampled_rows(hidden_states, positions, "positions", idx_mapping, "idx_mapping",
                   logits_start_loc, temperatures, seeds, vocab_size, d2t, first_column, tokens,
                   "tokens");
  if (!has_rows(sample, tokens, "tokens")) return;
#ifdef DFLASH_CUDA
  sample.logit_scale = static_cast<float>(logit_scale);
  LmHeadSampleParams params{head_operands(hidden_states, weight), sample};
  if (is_fused(hidden_states, params)) {
    const torch::stable::accelerator::DeviceGuard guard(hidden_states.get_device_index());
    const Tensor scratch = torch::stable::new_empty(
        hidden_states, {lm_head_sample_scratch_size(params)}, ScalarType::Byte);
    params.sample.scratch = scratch.data_ptr();
    DFLASH_LAUNCH(lm_head_sample, params, hidden_states);
    return;
  }
#endif
  const Tensor logits = torch::stable::new_empty(
      hidden_states, {hidden_states.size(0), weight.size(0)}, ScalarType::Float);
  linear(hidden_states, weight, std::nullopt, logits);
  sample_logits(logits, static_cast<float>(logit_scale), sample);
}

std::vector<int64_t> lm_head_sample_plan(const Tensor& hidden_states, const Tensor& weight,
                                         int64_t vocab_size) {
  check_head(hidden_states, weight);
  check_vocab_size(vocab_size, weight);
#ifdef DFLASH_CUDA
  LmHeadSampleParams params{head_operands(hidden_states, weight), {}};
  params.sample.vocab_size = vocab_size;
  const gemm::Choice choice = choose(params);
  if (is_fused(hidden_states, params)) return {choice.rows, choice.warpgroups, choice.splits};
#endif
  return {};
}

}  // namespace dflash

DFLASH_REGISTER(lm_head_sample)
DFLASH_REGISTER(lm_head_sample_plan)
