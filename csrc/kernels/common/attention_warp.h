// SPDX-License-Identifier: Apache-2.0
// What one warp does with a step of keys in shared memory: 16 packed rows against kTilesN * 8 keys
// on mma.sync, the softmax between the two products in registers.
#pragma once

#include "attention_tile.h"

namespace dflash::attention {

// The query stays in registers where it fits.
template <int D>
using QueryFragments = uint32_t[D > 128 ? 1 : D / 16][4];

// s = q k^T for a warp's 16 rows and kTilesN * 8 keys.
template <typename T, int D, int kPitch, int kTilesN>
__device__ __forceinline__ void multiply_query_key(float (&s)[kTilesN][4],
                                                   const QueryFragments<D>& q,
                                                   uint32_t query, uint32_t keys) {
  const int lane = threadIdx.x & 31;
  keys += (((lane & 7) + (lane >> 4) * 8) * kPitch + (lane >> 3 & 1) * 8) * 2;
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4];
    if constexpr (D > 128) {
      ldmatrix_x4(a, query + ((lane & 15) * kPitch + k * 16 + (lane >> 4) * 8) * 2);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[k][i];
    }
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, keys + (n * 8 * kPitch + k * 16) * 2);
      mma_m16n8k16<T>(s[n], a, b[0], b[1]);
      mma_m16n8k16<T>(s[n + 1], a, b[2], b[3]);
    }
  }
}

// Scores of keys a row does not see become -inf by selection: what their slots hold never counts.
template <int kTilesN>
__device__ __forceinline__ void mask_scores(float (&s)[kTilesN][4], const RowState (&rows)[2],
                                            int first_key) {
  const int column = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const KeyRange& keys = rows[j / 2].keys;
      const int key = column + n * 8 + j % 2;
      const bool hidden = (key < keys.begin) | (key >= keys.end);
      s[n][j] = hidden ? kNothing : s[n][j];
    }
  }
}

// Scores to probabilities in place; rescales acc.
template <int kTilesN, int kTilesD>
__device__ __forceinline__ void softmax(float (&s)[kTilesN][4], float (&acc)[kTilesD][4],
                                        RowState (&rows)[2]) {
  float alpha[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    RowState& row = rows[half];
    float m = row.m;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) m = fmaxf(m, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const float base = m == kNothing ? 0.0f : m;
    alpha[half] = exp2_fast(row.m - base);
    row.l *= alpha[half];
    row.m = m;
    float l = 0.0f;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int j = 2 * half; j < 2 * half + 2; ++j) {
        s[n][j] = exp2_fast(s[n][j] - base);
        l += s[n][j];
      }
    }
    row.l += l;
  }
  // Maxima settle early: most steps multiply by 1.
  if (!__any_sync(0xffffffffu, (alpha[0] != 1.0f) | (alpha[1] != 1.0f))) return;
#pragma unroll
  for (int d = 0; d < kTilesD; ++d) {
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[d][j] *= alpha[j / 2];
  }
}

// acc += p v.
template <typename T, int D, int kPitch, int kTilesN>
__device__ __forceinline__ void multiply_probability_value(float (&acc)[D / 8][4],
                                                           const float (&s)[kTilesN][4],
                                                           uint32_t values) {
  const int lane = threadIdx.x & 31;
  values += ((lane & 15) * kPitch + (lane >> 4) * 8) * 2;
#pragma unroll
  for (int k = 0; k < kTilesN / 2; ++k) {
    uint32_t a[4];
    pack_probabilities<T>(a, s[2 * k], s[2 * k + 1]);
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, values + (k * 16 * kPitch + d * 8) * 2);
      mma_m16n8k16<T>(acc[d], a, b[0], b[1]);
      mma_m16n8k16<T>(acc[d + 1], a, b[2], b[3]);
    }
  }
}

}  // namespace dflash::attention
