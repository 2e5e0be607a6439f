// SPDX-License-Identifier: Apache-2.0
#include "kernels/advance.h"

#include "batch_checks.h"

namespace dflash {

void advance(const Tensor& sampled_token_ids, const Tensor& num_sampled, const Tensor& idx_mapping,
             std::optional<Tensor> stop_token_ids, Tensor seq_lens, Tensor last_sampled,
             Tensor tokens_left, Tensor finished, Tensor step, Tensor output_ring,
             std::optional<Tensor> token_counts) {
  check_tensor(idx_mapping, "idx_mapping", {-1}, ScalarType::Int, idx_mapping);
  check_tensor(seq_lens, "seq_lens", {-1}, ScalarType::Int, idx_mapping);
  const int64_t num_reqs = idx_mapping.size(0);
  const int64_t num_states = seq_lens.size(0);
  check_tensor(sampled_token_ids, "sampled_token_ids", {num_reqs, -1}, ScalarType::Long,
               idx_mapping);
  const int64_t num_columns = sampled_token_ids.size(1);
  check_row_count(num_reqs * num_columns, "sampled_token_ids");
  check_tensor(num_sampled, "num_sampled", {num_reqs}, ScalarType::Int, idx_mapping);
  check_tensor(last_sampled, "last_sampled", {num_states}, ScalarType::Long, idx_mapping);
  check_tensor(tokens_left, "tokens_left", {num_states}, ScalarType::Int, idx_mapping);
  check_tensor(finished, "finished", {num_states}, ScalarType::Int, idx_mapping);
  check_tensor(step, "step", {1}, ScalarType::Long, idx_mapping);
  check_tensor(output_ring, "output_ring", {-1, num_states, 3 + num_columns}, ScalarType::Long,
               idx_mapping);
  STD_TORCH_CHECK(output_ring.size(0) > 0, "output_ring: expected at least one step, got ",
                  shape_string(output_ring));
  if (stop_token_ids.has_value()) {
    check_tensor(*stop_token_ids, "stop_token_ids", {num_states, -1}, ScalarType::Long,
                 idx_mapping);
  }
  if (token_counts.has_value()) {
    check_tensor(*token_counts, "token_counts", {num_states, -1}, ScalarType::Int, idx_mapping);
  }

  const AdvanceParams params{
      data_ptr<const int64_t>(sampled_token_ids),
      sampled_token_ids.stride(0),
      data_ptr<const int32_t>(num_sampled),
      data_ptr<const int32_t>(idx_mapping),
      data_ptr<const int64_t>(stop_token_ids),
      stop_token_ids.has_value() ? stop_token_ids->stride(0) : 0,
      static_cast<int32_t>(num_reqs),
      static_cast<int32_t>(num_columns),
      static_cast<int32_t>(stop_token_ids.has_value() ? stop_token_ids->size(1) : 0),
      output_ring.size(0),
      output_ring.stride(0),
      output_ring.stride(1),
      data_ptr<int32_t>(seq_lens),
      data_ptr<int64_t>(last_sampled),
      data_ptr<int32_t>(tokens_left),
      data_ptr<int32_t>(finished),
      data_ptr<int64_t>(step),
      data_ptr<int64_t>(output_ring),
      data_ptr<int32_t>(token_counts),
      token_counts.has_value() ? token_counts->stride(0) : 0,
      token_counts.has_value() ? token_counts->size(1) : 0};
  DFLASH_LAUNCH(advance, params, idx_mapping);
}

}  // namespace dflash

DFLASH_REGISTER(advance)
