// SPDX-License-Identifier: Apache-2.0
// Division of non-negative 32-bit numbers by one that the host knows: a multiplication and a shift.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace dflash {

struct Divisor {
  uint32_t divisor = 1, multiplier = 1u << 31, shift = 31;

  Divisor() = default;

  // multiplier = ceil(2^shift / d) with 2^(shift - 31) >= d: exact for every n < 2^31.
  explicit Divisor(int d) : divisor(static_cast<uint32_t>(d)) {
    while ((uint64_t{1} << (shift - 31)) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);
  }

  DFLASH_HOST_DEVICE int quotient(int n) const {
    return static_cast<int>((uint64_t{static_cast<uint32_t>(n)} * multiplier) >> shift);
  }

  DFLASH_HOST_DEVICE int remainder(int n) const {
    return n - quotient(n) * static_cast<int>(divisor);
  }
};

}  // namespace dflash
