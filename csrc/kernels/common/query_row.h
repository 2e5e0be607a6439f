// SPDX-License-Identifier: Apache-2.0
// One row of build_query's context and of its query block, the same on host and device.
#pragma once

#include "kernels/build_query.h"

namespace dflash {

DFLASH_HOST_DEVICE int64_t token_at(const TokenIds& ids, int32_t i) {
  if (ids.is_int32) return static_cast<const int32_t*>(ids.data)[i];
  return static_cast<const int64_t*>(ids.data)[i];
}

DFLASH_HOST_DEVICE void set_token(const TokenIds& ids, int32_t i, int64_t token) {
  if (ids.is_int32) static_cast<int32_t*>(ids.data)[i] = static_cast<int32_t>(token);
  else static_cast<int64_t*>(ids.data)[i] = token;
}

// The last request that starts at or before `row`, -1 for none: the owner of every row before
// query_start_loc[R].
DFLASH_HOST_DEVICE int32_t request_of_row(const int32_t* query_start_loc, int32_t num_reqs,
                                          int32_t row) {
  int32_t low = 0, high = num_reqs;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (query_start_loc[middle] <= row) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// One past the last valid row of request r.
DFLASH_HOST_DEVICE int32_t valid_end(const BuildQueryParams& p, int32_t r) {
  return p.query_start_loc[r + 1] - p.num_rejected[r];
}

// Row `row` of 0..T - 1: rejected, padded and tail rows get position 0 and are stored nowhere.
DFLASH_HOST_DEVICE void build_context_row(const BuildQueryParams& p, int32_t row) {
  const int32_t r = request_of_row(p.query_start_loc, p.num_reqs, row);
  const bool is_valid = r >= 0 && p.idx_mapping[r] >= 0 && row < valid_end(p, r);
  const int64_t position = is_valid ? p.target_positions[row] : 0;
  p.context_positions[row] = position;
  for (int g = 0; g < p.num_groups; ++g) {
    const KvGroup& group = p.groups[g];
    group.context_slot_mapping[row] =
        is_valid ? slot_at(group.block_table, r, position, p.max_model_len) : -1;
  }
}

// The sample row that query row `row` feeds, if any. Positions are not clamped: they key the noise.
DFLASH_HOST_DEVICE void build_sample_row(const BuildQueryParams& p, int32_t row, int64_t position,
                                         int32_t state) {
  const int32_t index = row % p.num_query_per_req - (p.sample_from_anchor ? 0 : 1);
  if (index < 0) return;
  const int32_t j = row / p.num_query_per_req * p.num_speculative_tokens + index;
  p.sample_rows[j] = row;
  p.sample_positions[j] = state < 0 ? 0 : position + (p.sample_from_anchor ? 1 : 0);
  p.sample_idx_mapping[j] = state;
}

// The state row of request r, -1 where it is padded: past the batch, by its map, or because no valid
// row of it gives a position to continue from.
DFLASH_HOST_DEVICE int32_t state_of(const BuildQueryParams& p, int32_t r) {
  if (r >= p.num_reqs || valid_end(p, r) <= p.query_start_loc[r]) return -1;
  return p.idx_mapping[r];
}

// Row `row` of 0..P * num_query_per_req: one more than there are, for the last offset.
DFLASH_HOST_DEVICE void build_query_row(const BuildQueryParams& p, int32_t row) {
  const int32_t r = row / p.num_query_per_req;
  const int32_t offset = row % p.num_query_per_req;
  if (offset == 0) p.draft_query_start_loc[r] = row;
  if (r == p.num_output_reqs) return;

  const int32_t state = state_of(p, r);
  if (state < 0) {
    set_token(p.query_input_ids, row, 0);
    p.query_positions[row] = 0;
    for (int g = 0; g < p.num_groups; ++g) p.groups[g].query_slot_mapping[row] = -1;
    if (offset == 0) p.query_seq_lens[r] = 0;
    build_sample_row(p, row, 0, -1);
    return;
  }

  const int64_t anchor = p.target_positions[valid_end(p, r) - 1] + 1;
  const int64_t position = anchor + offset;
  const int64_t bonus =
      p.num_sampled[r] > 0 ? p.last_sampled[state] : token_at(p.next_prefill_tokens, state);
  set_token(p.query_input_ids, row, offset == 0 ? bonus : p.mask_token_id);
  p.query_positions[row] = clamp_position(position, p.max_model_len);
  for (int g = 0; g < p.num_groups; ++g) {
    const KvGroup& group = p.groups[g];
    group.query_slot_mapping[row] = slot_at(group.block_table, r, position, p.max_model_len);
  }
  if (offset == 0) {
    const int64_t seq_len = anchor + p.num_query_per_req;
    p.query_seq_lens[r] =
        static_cast<int32_t>(seq_len < p.max_model_len ? seq_len : p.max_model_len);
  }
  build_sample_row(p, row, position, state);
}

}  // namespace dflash
