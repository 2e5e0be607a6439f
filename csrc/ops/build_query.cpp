// SPDX-License-Identifier: Apache-2.0
#include "kernels/build_query.h"

#include "batch_checks.h"

namespace dflash {
namespace {

using TensorList = std::vector<Tensor>;

void check_count(size_t count, const char* name, size_t expected) {
  STD_TORCH_CHECK(count == expected, name, ": expected ", expected, " (one per block table), got ",
                  count);
}

// int64, or int32 as some runtimes keep ids.
TokenIds token_ids(const Tensor& ids, const char* name, int64_t count, const Tensor& device_of) {
  const bool is_int32 = ids.scalar_type() == ScalarType::Int;
  check_tensor(ids, name, {count}, is_int32 ? ScalarType::Int : ScalarType::Long, device_of);
  return TokenIds{data_ptr<void>(ids), is_int32};
}

// "name[i]" for messages about an element of a list.
std::string element(const char* name, size_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

void set_groups(BuildQueryParams& params, const TensorList& block_tables,
                const std::vector<int64_t>& kv_block_sizes, const TensorList& context_slot_mappings,
                const TensorList& query_slot_mappings, const Tensor& idx_mapping) {
  const size_t num_groups = block_tables.size();
  STD_TORCH_CHECK(num_groups >= 1 && num_groups <= kMaxKvGroups, "block_tables: expected 1..",
                  kMaxKvGroups, " K/V groups, got ", num_groups);
  check_count(kv_block_sizes.size(), "kv_block_sizes", num_groups);
  check_count(context_slot_mappings.size(), "context_slot_mappings", num_groups);
  check_count(query_slot_mappings.size(), "query_slot_mappings", num_groups);

  const int64_t num_query_rows =
      static_cast<int64_t>(params.num_output_reqs) * params.num_query_per_req;
  params.num_groups = static_cast<int32_t>(num_groups);
  for (size_t g = 0; g < num_groups; ++g) {
    check_tensor(block_tables[g], element("block_tables", g).c_str(), {params.num_reqs, -1},
                 ScalarType::Int, idx_mapping);
    check_positive_int32(kv_block_sizes[g], element("kv_block_sizes", g).c_str());
    check_tensor(context_slot_mappings[g], element("context_slot_mappings", g).c_str(),
                 {params.num_context_rows}, ScalarType::Long, idx_mapping);
    check_tensor(query_slot_mappings[g], element("query_slot_mappings", g).c_str(),
                 {num_query_rows}, ScalarType::Long, idx_mapping);
    params.groups[g] = KvGroup{block_table_params(block_tables[g], kv_block_sizes[g]),
                               data_ptr<int64_t>(context_slot_mappings[g]),
                               data_ptr<int64_t>(query_slot_mappings[g])};
  }
}

}  // namespace

void build_query(const Tensor& target_positions, const Tensor& query_start_loc,
                 const Tensor& num_sampled, const Tensor& num_rejected, const Tensor& last_sampled,
                 const Tensor& next_prefill_tokens, const Tensor& idx_mapping,
                 const TensorList& block_tables, const std::vector<int64_t>& kv_block_sizes,
                 int64_t num_speculative_tokens, int64_t mask_token_id, int64_t max_model_len,
                 bool sample_from_anchor, Tensor context_positions,
                 const TensorList& context_slot_mappings, Tensor query_input_ids,
                 Tensor query_positions, const TensorList& query_slot_mappings,
                 Tensor query_seq_lens, Tensor draft_query_start_loc, Tensor sample_rows,
                 Tensor sample_positions, Tensor sample_idx_mapping) {
  check_tensor(idx_mapping, "idx_mapping", {-1}, ScalarType::Int, idx_mapping);
  check_tensor(target_positions, "target_positions", {-1}, ScalarType::Long, idx_mapping);
  check_tensor(last_sampled, "last_sampled", {-1}, ScalarType::Long, idx_mapping);
  const int64_t num_reqs = idx_mapping.size(0);
  const int64_t num_context_rows = target_positions.size(0);
  const int64_t num_states = last_sampled.size(0);
  check_tensor(query_start_loc, "query_start_loc", {num_reqs + 1}, ScalarType::Int, idx_mapping);
  check_tensor(num_sampled, "num_sampled", {num_reqs}, ScalarType::Int, idx_mapping);
  check_tensor(num_rejected, "num_rejected", {num_reqs}, ScalarType::Int, idx_mapping);
  check_positive_int32(num_speculative_tokens, "num_speculative_tokens");
  check_positive_int32(max_model_len, "max_model_len");

  const int64_t num_query_per_req = num_speculative_tokens + (sample_from_anchor ? 0 : 1);
  check_row_count(num_query_per_req, "num_query_per_req");
  check_tensor(query_seq_lens, "query_seq_lens", {-1}, ScalarType::Int, idx_mapping);
  const int64_t num_output_reqs = query_seq_lens.size(0);
  STD_TORCH_CHECK(num_output_reqs >= num_reqs, "query_seq_lens: expected at least ", num_reqs,
                  " requests, got ", num_output_reqs);
  const int64_t num_query_rows = num_output_reqs * num_query_per_req;
  const int64_t num_sample_rows = num_output_reqs * num_speculative_tokens;
  check_row_count(num_context_rows, "target_positions");
  check_row_count(num_query_rows, "query_seq_lens * num_query_per_req");
  check_tensor(context_positions, "context_positions", {num_context_rows}, ScalarType::Long,
               idx_mapping);
  check_tensor(query_positions, "query_positions", {num_query_rows}, ScalarType::Long, idx_mapping);
  check_tensor(draft_query_start_loc, "draft_query_start_loc", {num_output_reqs + 1},
               ScalarType::Int, idx_mapping);
  check_tensor(sample_rows, "sample_rows", {num_sample_rows}, ScalarType::Long, idx_mapping);
  check_tensor(sample_positions, "sample_positions", {num_sample_rows}, ScalarType::Long,
               idx_mapping);
  check_tensor(sample_idx_mapping, "sample_idx_mapping", {num_sample_rows}, ScalarType::Int,
               idx_mapping);

  BuildQueryParams params{};
  params.target_positions = data_ptr<const int64_t>(target_positions);
  params.query_start_loc = data_ptr<const int32_t>(query_start_loc);
  params.num_sampled = data_ptr<const int32_t>(num_sampled);
  params.num_rejected = data_ptr<const int32_t>(num_rejected);
  params.last_sampled = data_ptr<const int64_t>(last_sampled);
  params.next_prefill_tokens =
      token_ids(next_prefill_tokens, "next_prefill_tokens", num_states, idx_mapping);
  params.idx_mapping = data_ptr<const int32_t>(idx_mapping);
  params.num_context_rows = static_cast<int32_t>(num_context_rows);
  params.num_reqs = static_cast<int32_t>(num_reqs);
  params.num_output_reqs = static_cast<int32_t>(num_output_reqs);
  params.num_speculative_tokens = static_cast<int32_t>(num_speculative_tokens);
  params.num_query_per_req = static_cast<int32_t>(num_query_per_req);
  params.mask_token_id = mask_token_id;
  params.max_model_len = static_cast<int32_t>(max_model_len);
  params.sample_from_anchor = sample_from_anchor;
  params.context_positions = data_ptr<int64_t>(context_positions);
  params.query_input_ids =
      token_ids(query_input_ids, "query_input_ids", num_query_rows, idx_mapping);
  params.query_positions = data_ptr<int64_t>(query_positions);
  params.query_seq_lens = data_ptr<int32_t>(query_seq_lens);
  params.draft_query_start_loc = data_ptr<int32_t>(draft_query_start_loc);
  params.sample_rows = data_ptr<int64_t>(sample_rows);
  params.sample_positions = data_ptr<int64_t>(sample_positions);
  params.sample_idx_mapping = data_ptr<int32_t>(sample_idx_mapping);
  set_groups(params, block_tables, kv_block_sizes, context_slot_mappings, query_slot_mappings,
             idx_mapping);
  DFLASH_LAUNCH(build_query, params, idx_mapping);
}

}  // namespace dflash

DFLASH_REGISTER(build_query)
