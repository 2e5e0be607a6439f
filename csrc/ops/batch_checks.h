// SPDX-License-Identifier: Apache-2.0
// Checks and parameters that the ops over a batch's integers share.
#pragma once

#include <limits>

#include "kernels/common/slots.h"
#include "torch_utils.h"

namespace dflash {

inline void check_positive_int32(int64_t value, const char* name) {
  STD_TORCH_CHECK(value > 0 && value <= std::numeric_limits<int32_t>::max(), name,
                  ": expected 1..2147483647, got ", value);
}

// Offsets are int32, and one past the last row is computed too.
inline void check_row_count(int64_t value, const char* name) {
  STD_TORCH_CHECK(value < std::numeric_limits<int32_t>::max(), name,
                  ": expected fewer than 2147483647 rows, got ", value);
}

inline BlockTable block_table_params(const Tensor& block_table, int64_t kv_block_size) {
  return BlockTable{data_ptr<const int32_t>(block_table), block_table.stride(0),
                    static_cast<int32_t>(block_table.size(1)), static_cast<int32_t>(kv_block_size)};
}

}  // namespace dflash
