// SPDX-License-Identifier: Apache-2.0
// A weight [M, K] of e4m3 bytes as the streaming GEMM reads it: tiles of 64 outputs x 64 inputs,
// 4096 bytes each, along K first; what lies past M or K is zero. In a tile 16 rows (a warp's) x 32
// inputs are 512 bytes, 16 a lane: lane 4 g + t has, of rows g and g + 8, inputs 2 t, 2 t + 1 of
// every 8. So two loads of 16 bytes a thread, free of bank conflicts, are the fragments of four
// m16n8k16. dflash/ops/linear_fp8.py packs.
#pragma once

#include "dtype.h"

namespace dflash::fp8 {

constexpr int kTileSize = 64;  // outputs and inputs of a tile
constexpr int kTileBytes = kTileSize * kTileSize;
constexpr int kWarpBytes = kTileBytes / 4;  // of 16 rows

inline int64_t num_tiles(int64_t size) { return (size + kTileSize - 1) / kTileSize; }

// Weight [row, column] of a tile lies at row_offset + column_offset.
DFLASH_HOST_DEVICE constexpr int row_offset(int row) {
  return row / 16 * kWarpBytes + row % 8 * 64 + 1 - row % 16 / 8;
}

DFLASH_HOST_DEVICE constexpr int column_offset(int column) {
  return column / 32 * (kWarpBytes / 2) + column % 8 / 2 * 16 + column % 32 / 8 * 4 +
         column % 2 * 2;
}

#if defined(__CUDACC__)

// An e4m3 byte at the top of a 16-bit half becomes T: its sign stays, exponent and mantissa move
// down to T's, and one product, exact for subnormals too, corrects the exponent's bias.
template <typename T>
struct Widening;

template <>
struct Widening<BFloat16> {
  static constexpr int kShift = 4;
  static constexpr uint32_t kMagnitude = 0x07f007f0, kCorrection = 0x7b807b80;  // 2^120
};

template <>
struct Widening<Half> {
  static constexpr int kShift = 1;
  static constexpr uint32_t kMagnitude = 0x3f803f80, kCorrection = 0x5c005c00;  // 2^8
};

template <typename T>
__device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t multiply2<BFloat16>(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.bf16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

template <>
__device__ __forceinline__ uint32_t multiply2<Half>(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.f16x2 %0, %1, %2;\n" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Four bytes as two pairs of T: bytes 1 and 3, bytes 0 and 2. NaN does not occur: it becomes 480.
// NOTE: 9 instructions for 4 weights, of which 5 need the integer pipe.
template <typename T>
__device__ __forceinline__ void widen(uint32_t bytes, uint32_t& upper, uint32_t& lower) {
  using W = Widening<T>;
  constexpr uint32_t kSign = 0x80008000;
  const uint32_t high = (bytes & kSign) | (bytes >> W::kShift & W::kMagnitude);
  const uint32_t low = (bytes << 8 & kSign) | (bytes << (8 - W::kShift) & W::kMagnitude);
  upper = multiply2<T>(high, W::kCorrection);
  lower = multiply2<T>(low, W::kCorrection);
}

#endif

}  // namespace dflash::fp8
