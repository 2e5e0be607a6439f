// SPDX-License-Identifier: Apache-2.0
// First maximum as one integer: the larger key wins, whatever the order of the comparisons.
#pragma once

#include <cstdint>
#include <limits>

#include "dtype.h"

namespace dflash {

inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Integers that order as the floats do (-0 == 0, NaN as -inf).
DFLASH_HOST_DEVICE uint32_t float_key(float value) {
  const uint32_t bits = float_bits((value == value ? value : kNegativeInfinity) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DFLASH_HOST_DEVICE float float_of_key(uint32_t key) {
  return bits_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Upper word: the value's key. Lower word: the complement of the index, so that the first of equal
// values wins.
DFLASH_HOST_DEVICE uint64_t argmax_key(float value, int64_t index) {
  return static_cast<uint64_t>(float_key(value)) << 32 |
         (0xffffffffu - static_cast<uint32_t>(index));
}

DFLASH_HOST_DEVICE int64_t argmax_index(uint64_t key) {
  return 0xffffffffu - static_cast<uint32_t>(key);
}

DFLASH_HOST_DEVICE float argmax_value(uint64_t key) {
  return float_of_key(static_cast<uint32_t>(key >> 32));
}

}  // namespace dflash
