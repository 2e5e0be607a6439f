// SPDX-License-Identifier: Apache-2.0
// One request and one ring entry of advance, the same on host and device.
#pragma once

#include "dtype.h"
#include "kernels/advance.h"

namespace dflash {

// Values of `finished`.
constexpr int32_t kRunning = 0;
constexpr int32_t kStopToken = 1;
constexpr int32_t kLength = 2;

// step, num_sampled, finished.
constexpr int kRingHeader = 3;

DFLASH_HOST_DEVICE int64_t* ring_row(const AdvanceParams& p, int64_t step, int32_t state) {
  return p.output_ring + step % p.ring_size * p.ring_stride + state * p.ring_row_stride;
}

DFLASH_HOST_DEVICE bool is_stop_token(const AdvanceParams& p, int32_t state, int64_t token) {
  if (token < 0) return false;
  for (int32_t k = 0; k < p.num_stop_ids; ++k) {
    if (p.stop_token_ids[state * p.stop_stride + k] == token) return true;
  }
  return false;
}

// One more of `token`. The same token can be counted by several threads at once.
DFLASH_HOST_DEVICE void count_token(const AdvanceParams& p, int32_t state, int64_t token) {
  if (p.token_counts == nullptr || token < 0 || token >= p.num_counted) return;
  int32_t* count = p.token_counts + state * p.counts_stride + token;
#if defined(__CUDA_ARCH__)
  atomicAdd(count, 1);
#else
  *count += 1;
#endif
}

// The token in column `column` of request r's ring row, which is counted where it is committed.
DFLASH_HOST_DEVICE void advance_ring_token(const AdvanceParams& p, int64_t step, int32_t r,
                                           int32_t column) {
  const int32_t state = p.idx_mapping[r];
  if (state < 0) return;
  const bool committed = column < p.num_sampled[r];
  const int64_t token = committed ? p.sampled_token_ids[r * p.sampled_stride + column] : -1;
  ring_row(p, step, state)[kRingHeader + column] = token;
  count_token(p, state, token);
}

// State and ring header of request r. Nothing is committed after a stop token, so only the last
// token can be one.
DFLASH_HOST_DEVICE void advance_row(const AdvanceParams& p, int64_t step, int32_t r) {
  const int32_t state = p.idx_mapping[r];
  if (state < 0) return;
  const int32_t num_sampled = p.num_sampled[r];
  int32_t finished = p.finished[state];
  if (num_sampled > 0) {
    const int64_t token = p.sampled_token_ids[r * p.sampled_stride + num_sampled - 1];
    const int32_t left = p.tokens_left[state] - num_sampled;
    finished = is_stop_token(p, state, token) ? kStopToken : left <= 0 ? kLength : kRunning;
    p.seq_lens[state] += num_sampled;
    p.last_sampled[state] = token;
    p.tokens_left[state] = left;
    p.finished[state] = finished;
  }
  int64_t* row = ring_row(p, step, state);
  row[0] = step;
  row[1] = num_sampled;
  row[2] = finished;
}

}  // namespace dflash
