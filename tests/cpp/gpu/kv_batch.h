// SPDX-License-Identifier: Apache-2.0
// What the kernels that store K and V are tested on: a RoPE table, slots with rejected rows,
// caches.
#pragma once

#include "../typed.h"
#include "kernels/common/kv_cache.h"

namespace dflash::test {

inline constexpr int64_t kMaxPositions = 64;

// Rows 1, 5, 9, ... are not stored; the others go backwards from the last slot.
inline std::vector<int64_t> make_slots(int64_t num_rows, int64_t num_slots) {
  std::vector<int64_t> slots;
  for (int64_t r = 0; r < num_rows; ++r) slots.push_back(r % 4 == 1 ? -1 : num_slots - 1 - r);
  return slots;
}

inline std::vector<int64_t> make_positions(int64_t num_rows) {
  std::vector<int64_t> positions;
  for (int64_t r = 0; r < num_rows; ++r) positions.push_back(r * 7 % kMaxPositions);
  return positions;
}

// One K or V cache, poisoned; the heads of a block before its tokens (HND) or after (NHD).
template <typename T>
struct CacheBuffer {
  int64_t kv_block_size, num_kv_heads, head_dim;
  bool is_hnd;
  std::vector<T> data;

  CacheBuffer(int64_t num_slots, int64_t kv_block_size, int64_t num_kv_heads, int64_t head_dim,
              bool is_hnd)
      : kv_block_size(kv_block_size),
        num_kv_heads(num_kv_heads),
        head_dim(head_dim),
        is_hnd(is_hnd),
        data(typed<T>(std::vector<float>(num_slots * num_kv_heads * head_dim, 20))) {}

  KvCache view(T* base) const {
    const int64_t block_stride = kv_block_size * num_kv_heads * head_dim;
    if (is_hnd) return KvCache{base, block_stride, head_dim, kv_block_size * head_dim};
    return KvCache{base, block_stride, num_kv_heads * head_dim, head_dim};
  }
};

}  // namespace dflash::test
