// SPDX-License-Identifier: Apache-2.0
// First maximum as one integer: the larger key wins, whatever the order of the comparisons.
#pragma once

#include <cstdint>
#include <limits>

#include "dtype.h"

namespace dflash {

inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Upper word: the value, mapped so that integers order as floats do (-0 == 0, NaN as -inf). Lower
// word: the complement of the index, so that the first of equal values wins.
DFLASH_HOST_DEVICE uint64_t argmax_key(float value, int64_t index) {
  const uint32_t bits = float_bits((value == value ? value : kNegativeInfinity) + 0.0f);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - static_cast<uint32_t>(index));
}

DFLASH_HOST_DEVICE int64_t argmax_index(uint64_t key) {
  return 0xffffffffu - static_cast<uint32_t>(key);
}

DFLASH_HOST_DEVICE float argmax_value(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return bits_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

}  // namespace dflash
