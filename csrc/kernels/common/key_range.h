// SPDX-License-Identifier: Apache-2.0
// Which keys a query row sees, as an interval, and how keys are dealt to splits. One arithmetic for
// the kernels (which compute it from device lengths, so that a graph replays at any length) and the
// CPU twin.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace dflash {

struct KeyRange {
  int begin;
  int end;  // may lie before begin: nothing is visible
};

struct KeyMask {
  int max_keys;  // min(max_seq_len, block table's capacity)
  bool causal;
  int window_left;   // -1 = no bound
  int window_right;  // -1 = no bound
};

// Keys that row `row` of a request sees. Both ends grow with the row, so that a tile of rows sees
// [visible_keys(first).begin, visible_keys(last).end).
DFLASH_HOST_DEVICE KeyRange visible_keys(const KeyMask& mask, int seq_len, int query_len, int row) {
  const int64_t position = static_cast<int64_t>(seq_len) - query_len + row;
  int64_t begin = 0;
  int64_t end = seq_len < mask.max_keys ? seq_len : mask.max_keys;
  if (mask.causal && position + 1 < end) end = position + 1;
  if (mask.window_right >= 0 && position + mask.window_right + 1 < end)
    end = position + mask.window_right + 1;
  if (mask.window_left >= 0 && position - mask.window_left > begin)
    begin = position - mask.window_left;
  if (begin > mask.max_keys) begin = mask.max_keys;
  return {static_cast<int>(begin), static_cast<int>(end < 0 ? 0 : end)};
}

// Keys that some row in [first, last] sees.
DFLASH_HOST_DEVICE KeyRange tile_keys(const KeyMask& mask, int seq_len, int query_len, int first,
                                      int last) {
  return {visible_keys(mask, seq_len, query_len, first).begin,
          visible_keys(mask, seq_len, query_len, last).end};
}

DFLASH_HOST_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Keys are dealt in steps: step u, keys [u * step_keys, (u + 1) * step_keys), belongs to split
// u % num_splits. Absolute positions alone decide, so that a row adds up its keys in the same order
// in whatever batch, block or tile it stands.
struct Deal {
  int first;  // step; the next is num_splits further
  int count;
};

DFLASH_HOST_DEVICE Deal deal_steps(KeyRange range, int step_keys, int num_splits, int split) {
  if (range.end <= range.begin) return {split, 0};
  const int begin = range.begin / step_keys, last = (range.end - 1) / step_keys;
  const int owner = begin % num_splits;  // of the first step
  const int first = begin + split - owner + (split < owner ? num_splits : 0);
  return {first, first > last ? 0 : (last - first) / num_splits + 1};
}

}  // namespace dflash
