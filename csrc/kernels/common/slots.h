// SPDX-License-Identifier: Apache-2.0
// Where a position lives in the paged K/V cache.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace dflash {

// The block of each kv_block_size positions, a row per request of the batch.
struct BlockTable {
  const int32_t* blocks;  // [num_reqs, num_columns]
  int64_t stride;
  int32_t num_columns;
  int32_t kv_block_size;
};

// The slot of `position` of batch row r, or -1 where nothing may be stored: past max_model_len,
// past the table, or in the null block.
DFLASH_HOST_DEVICE int64_t slot_at(const BlockTable& table, int32_t r, int64_t position,
                                   int32_t max_model_len) {
  if (position < 0 || position >= max_model_len) return -1;
  const int32_t column = static_cast<int32_t>(position) / table.kv_block_size;
  if (column >= table.num_columns) return -1;
  const int32_t block = table.blocks[r * table.stride + column];
  if (block <= 0) return -1;
  return static_cast<int64_t>(block) * table.kv_block_size +
         static_cast<int32_t>(position) % table.kv_block_size;
}

// A position that RoPE tables and the model can take.
DFLASH_HOST_DEVICE int64_t clamp_position(int64_t position, int32_t max_model_len) {
  return position < max_model_len ? position : max_model_len - 1;
}

}  // namespace dflash
