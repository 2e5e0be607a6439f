// SPDX-License-Identifier: Apache-2.0
// One row of build_verify, the same on host and device.
#pragma once

#include "kernels/build_verify.h"

namespace dflash {

// Row `row` of 0..R * Q: one more than there are, for the last offset.
DFLASH_HOST_DEVICE void build_verify_row(const BuildVerifyParams& p, int32_t row) {
  const int32_t r = row / p.rows_per_req;
  const int32_t offset = row % p.rows_per_req;
  if (offset == 0) p.query_start_loc[r] = row;
  if (r == p.num_reqs) return;

  const int32_t state = p.idx_mapping[r];
  if (state < 0) {
    p.input_ids[row] = 0;
    p.positions[row] = 0;
    p.slot_mapping[row] = -1;
    if (offset == 0) p.query_seq_lens[r] = 0;
    return;
  }

  const int32_t seq_len = p.seq_lens[state];
  const int64_t position = static_cast<int64_t>(seq_len) + offset;
  const int64_t id = offset == 0 ? p.last_sampled[state]
                                 : p.draft_tokens[state * p.draft_tokens_stride + offset - 1];
  // An absent draft (-1) is embedded as token 0 and rejected later.
  p.input_ids[row] = id < 0 ? 0 : id;
  p.positions[row] = clamp_position(position, p.max_model_len);
  p.slot_mapping[row] = slot_at(p.block_table, r, position, p.max_model_len);
  // NOTE: not clamped: attention aligns the causal diagonal to the end of the block.
  if (offset == 0) p.query_seq_lens[r] = seq_len + p.rows_per_req;
}

}  // namespace dflash
