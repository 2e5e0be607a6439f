// SPDX-License-Identifier: Apache-2.0
// Which products of x [T, K] and weight [M, K]^T the streaming GEMM takes, and in what shape: all
// of its choices, none of them made of the device, so that a build names one order of sums.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace dflash::gemm {

struct Operands {
  const void* x;       // [num_rows, size]
  const void* weight;  // [num_outputs, size]
  int64_t num_rows;
  int64_t num_outputs;
  int64_t size;
  int64_t x_stride;
  int64_t weight_stride;
  DType dtype;
};

struct Choice {
  int rows = 0;        // of the kernel, x padded to them; 0: not taken
  int warpgroups = 0;  // 64 outputs each, of a tile
  int splits = 0;      // of K
};

constexpr int kMaxRows = 128;
constexpr int kSms = 132;  // of an H100 or H200
constexpr int kMinSplitSize = 1024;  // of K, that two CTAs may share

// The bulk copy engine's limits: 16-byte rows, 32-bit coordinates.
inline bool can_stream(const Operands& o, int64_t max_rows = kMaxRows) {
  constexpr int64_t kMaxSize = int64_t{1} << 30;
  const bool is_16_bit = o.dtype == DType::kBFloat16 || o.dtype == DType::kFloat16;
  const bool has_size = o.num_rows > 0 && o.num_outputs > 0 && o.size > 0;
  const bool fits = o.num_rows <= max_rows && o.num_outputs <= kMaxSize && o.size <= kMaxSize;
  const auto aligned = [](const void* p, int64_t rows, int64_t stride) {
    const bool has_aligned_rows = rows == 1 || (stride > 0 && stride % 8 == 0);
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && has_aligned_rows;
  };
  return is_16_bit && has_size && fits && aligned(o.x, o.num_rows, o.x_stride) &&
         aligned(o.weight, o.num_outputs, o.weight_stride);
}

// Measured on an H200 (docs/performance.md).
// NOTE: splits decides the order of a sum: it must not look at num_rows.
inline Choice choose(const Operands& o) {
  if (!can_stream(o)) return {};
  const int64_t groups = (o.num_outputs + 63) / 64;
  Choice c;
  c.rows = o.num_rows <= 16 ? 16 : o.num_rows <= 32 ? 32 : o.num_rows <= 64 ? 64 : 128;
  c.splits = 2 * groups <= kSms && o.size >= kMinSplitSize ? 2 : 1;
  // Wide tiles read x less often, where there are enough of them.
  c.warpgroups = groups > kSms ? 3 : 1;
  return c;
}

// Whether rows are worth two or four blocks of kMaxRows, of which pairs of CTAs share a wide weight,
// in the shape that choose names for it (a row's bits are those it has in such a block): where
// little of a block is padding and pairs of SMs are busy to the end of the last round. The library,
// which such a launch beats by 4 %, serves the rest.
inline bool takes_row_blocks(const Operands& o) {
  constexpr int64_t kPair = 2 * kMaxRows, kMaxBlockRows = 2 * kPair, kTileRows = 3 * 64;
  if (o.num_rows <= kMaxRows || !can_stream(o, kMaxBlockRows)) return false;
  const int64_t block_pairs = (o.num_rows + kPair - 1) / kPair;
  const int64_t units = (o.num_outputs + kTileRows - 1) / kTileRows * block_pairs;
  const int64_t rounds = (units + kSms / 2 - 1) / (kSms / 2);
  const bool fills_blocks = 8 * o.num_rows > 7 * block_pairs * kPair;
  const bool fills_sms = 16 * units >= 15 * rounds * (kSms / 2);
  return fills_blocks && fills_sms && o.num_outputs > 2 * 64 * kSms;
}

// Packed weights arrive in half the time. Pairs of CTAs halve K of tiles as wide as the SMs allow:
// no fewer CTAs, more warps to widen with, and x is read less often.
// NOTE: as choose, it must not look at num_rows.
inline Choice choose_packed(const Operands& o) {
  Choice c = choose(o);
  if (c.rows == 0 || o.size < kMinSplitSize) return c;
  const int64_t groups = (o.num_outputs + 63) / 64;
  c.warpgroups = 2 * groups <= kSms ? 1 : groups <= kSms ? 2 : 3;
  c.splits = 2 * ((groups + c.warpgroups - 1) / c.warpgroups) <= kSms ? 2 : 1;
  return c;
}

// Tiles of 128 outputs, for an epilogue that needs that many neighbours.
inline Choice choose_pairs(const Operands& o) {
  Choice c = choose(o);
  if (c.rows == 0) return c;
  c.warpgroups = 2;
  c.splits = (o.num_outputs + 127) / 128 * 2 <= kSms && o.size >= kMinSplitSize ? 2 : 1;
  return c;
}

}  // namespace dflash::gemm
