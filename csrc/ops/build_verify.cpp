// SPDX-License-Identifier: Apache-2.0
#include "kernels/build_verify.h"

#include "batch_checks.h"

namespace dflash {

void build_verify(const Tensor& idx_mapping, const Tensor& seq_lens, const Tensor& last_sampled,
                  const Tensor& draft_tokens, const Tensor& block_table, int64_t kv_block_size,
                  int64_t max_model_len, Tensor input_ids, Tensor positions, Tensor slot_mapping,
                  Tensor query_seq_lens, Tensor query_start_loc) {
  check_tensor(idx_mapping, "idx_mapping", {-1}, ScalarType::Int, idx_mapping);
  check_tensor(seq_lens, "seq_lens", {-1}, ScalarType::Int, idx_mapping);
  const int64_t num_reqs = idx_mapping.size(0);
  const int64_t num_states = seq_lens.size(0);
  check_tensor(last_sampled, "last_sampled", {num_states}, ScalarType::Long, idx_mapping);
  check_tensor(draft_tokens, "draft_tokens", {num_states, -1}, ScalarType::Long, idx_mapping);
  check_tensor(block_table, "block_table", {num_reqs, -1}, ScalarType::Int, idx_mapping);
  check_positive_int32(kv_block_size, "kv_block_size");
  check_positive_int32(max_model_len, "max_model_len");

  const int64_t rows_per_req = draft_tokens.size(1) + 1;
  const int64_t num_rows = num_reqs * rows_per_req;
  check_row_count(num_rows, "num_reqs * (num_draft_tokens + 1)");
  check_tensor(input_ids, "input_ids", {num_rows}, ScalarType::Long, idx_mapping);
  check_tensor(positions, "positions", {num_rows}, ScalarType::Long, idx_mapping);
  check_tensor(slot_mapping, "slot_mapping", {num_rows}, ScalarType::Long, idx_mapping);
  check_tensor(query_seq_lens, "query_seq_lens", {num_reqs}, ScalarType::Int, idx_mapping);
  check_tensor(query_start_loc, "query_start_loc", {num_reqs + 1}, ScalarType::Int, idx_mapping);

  const BuildVerifyParams params{data_ptr<const int32_t>(idx_mapping),
                                 data_ptr<const int32_t>(seq_lens),
                                 data_ptr<const int64_t>(last_sampled),
                                 data_ptr<const int64_t>(draft_tokens),
                                 draft_tokens.stride(0),
                                 block_table_params(block_table, kv_block_size),
                                 static_cast<int32_t>(num_reqs),
                                 static_cast<int32_t>(rows_per_req),
                                 static_cast<int32_t>(max_model_len),
                                 data_ptr<int64_t>(input_ids),
                                 data_ptr<int64_t>(positions),
                                 data_ptr<int64_t>(slot_mapping),
                                 data_ptr<int32_t>(query_seq_lens),
                                 data_ptr<int32_t>(query_start_loc)};
  DFLASH_LAUNCH(build_verify, params, idx_mapping);
}

}  // namespace dflash

DFLASH_REGISTER(build_verify)
