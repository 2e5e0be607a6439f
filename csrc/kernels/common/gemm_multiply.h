// SPDX-License-Identifier: Apache-2.0
// What a warpgroup of the streaming GEMM does with the stages of its ring: products by wgmma on
// sm_90a, by mma.sync elsewhere; weights of bytes are widened on their way.
#pragma once

#include "fp8_weight.h"
#include "gemm_ring.h"
#include "mma.h"
#include "wgmma.h"

namespace dflash::gemm {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// acc += the warpgroup's 64 weight rows x the rows of a stage, under way on return.
template <typename T, class L, int N, int kAtoms>
__device__ __forceinline__ void multiply(float (&acc)[N / 8][4], uint32_t stage, int group) {
  wgmma_fence();
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    const uint64_t weight =
        swizzled_matrix(stage + a * L::kWeightAtomBytes + group * (kGroupRows * 128));
    const uint64_t rows = swizzled_matrix(stage + L::kRowsAt + a * L::kRowsAtomBytes);
#pragma unroll
    for (int k = 0; k < kAtom / 16; ++k) wgmma<T>(acc, weight + 2 * k, rows + 2 * k);
  }
  wgmma_commit();
}

// The same with an atom's weights in registers, which must stay until it is done.
template <typename T, int N>
__device__ __forceinline__ void multiply_atom(float (&acc)[N / 8][4],
                                              const uint32_t (&weights)[kAtom / 16][4],
                                              uint32_t rows_at) {
  const uint64_t rows = swizzled_matrix(rows_at);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kAtom / 16; ++k) wgmma<T>(acc, weights[k], rows + 2 * k);
  wgmma_commit();
}

// Until all products but the last call's are done.
__device__ __forceinline__ void multiply_wait_last() { wgmma_wait<1>(); }
__device__ __forceinline__ void multiply_wait_all() { wgmma_wait<0>(); }

#else

// Where the 16 bytes from `column` (of 128) of a row lie in a swizzled matrix.
__device__ __forceinline__ uint32_t swizzled_row(uint32_t matrix, int row, int column) {
  return matrix + row * 128 + (column ^ ((row & 7) << 4));
}

// acc += 16 weight rows x 16 elements of K of the rows of a swizzled matrix.
template <typename T, int N>
__device__ __forceinline__ void multiply_rows(float (&acc)[N / 8][4], const uint32_t (&w)[4],
                                              uint32_t rows, int k) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < N / 16; ++n) {
    uint32_t r[4];
    ldmatrix_x4(r, swizzled_row(rows, n * 16 + lane / 16 * 8 + lane % 8,
                                k * 32 + lane / 8 % 2 * 16));
    mma_m16n8k16<T>(acc[2 * n], w, r[0], r[1]);
    mma_m16n8k16<T>(acc[2 * n + 1], w, r[2], r[3]);
  }
}

// NOTE: the portable body. The host launches it nowhere yet: sm_100f has the library's GEMM. Its
// reads are not done when a stage is given back to another CTA (Ring::release).
template <typename T, class L, int N, int kAtoms>
__device__ __forceinline__ void multiply(float (&acc)[N / 8][4], uint32_t stage, int group) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
  for (int a = 0; a < kAtoms; ++a) {
    const uint32_t weight = stage + a * L::kWeightAtomBytes + group * (kGroupRows * 128);
    const uint32_t rows = stage + L::kRowsAt + a * L::kRowsAtomBytes;
#pragma unroll
    for (int k = 0; k < kAtom / 16; ++k) {
      uint32_t w[4];
      ldmatrix_x4(w, swizzled_row(weight, warp * 16 + lane % 16, k * 32 + lane / 16 * 16));
      multiply_rows<T, N>(acc, w, rows, k);
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void multiply_atom(float (&acc)[N / 8][4],
                                              const uint32_t (&weights)[kAtom / 16][4],
                                              uint32_t rows) {
#pragma unroll
  for (int k = 0; k < kAtom / 16; ++k) multiply_rows<T, N>(acc, weights[k], rows, k);
}

__device__ __forceinline__ void multiply_wait_last() { __syncwarp(); }
__device__ __forceinline__ void multiply_wait_all() { __syncwarp(); }

#endif

// A thread's weights of an atom, as four fragments.
template <typename T>
__device__ __forceinline__ void widen_atom(uint32_t (&weights)[kAtom / 16][4],
                                           const uint32_t (&packed)[kAtom / 32][4]) {
#pragma unroll
  for (int k = 0; k < kAtom / 16; ++k) {
    const uint32_t(&words)[4] = packed[k / 2];
    fp8::widen<T>(words[k % 2 * 2], weights[k][0], weights[k][1]);
    fp8::widen<T>(words[k % 2 * 2 + 1], weights[k][2], weights[k][3]);
  }
}

// accumulate for packed weights: an atom is widened while the products of the one before run, so
// two sets of fragments are alive, and a stage is given back in the middle of the next.
template <typename T, class L, int N, int kAtoms>
__device__ __forceinline__ void accumulate_packed(float (&acc)[N / 8][4], Ring<L>& ring,
                                                  int num_steps, int group) {
  static_assert(kAtoms == 2, "the ring's stage is one atom behind");
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const uint32_t mine = group * kAtoms * fp8::kTileBytes + warp * fp8::kWarpBytes + lane * 16;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
  int last = 0;
  for (int step = 0; step < num_steps; ++step) {
    mbarrier_wait(ring.full_barrier(), ring.parity);
    const uint32_t stage = ring.address();
    uint32_t packed[kAtoms][kAtom / 32][4];
#pragma unroll
    for (int i = 0; i < kAtoms * (kAtom / 32); ++i) {
      const uint32_t from = stage + mine + i / 2 * fp8::kTileBytes + i % 2 * fp8::kWarpBytes / 2;
      load_shared_words(packed[i / 2][i % 2], from);
    }
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      multiply_wait_last();
      if (a == 1 && step > 0 && lane == 0) ring.release(last);
      uint32_t weights[kAtom / 16][4];
      widen_atom<T>(weights, packed[a]);
      multiply_atom<T, N>(acc, weights, stage + L::kRowsAt + a * L::kRowsAtomBytes);
    }
    last = ring.stage;
    ring.advance();
  }
  multiply_wait_all();
  if (lane == 0) ring.release(last);
}

// A tile's products into acc; every stage is given back once its products are done.
template <typename T, class L, int N, int kAtoms>
__device__ __forceinline__ void accumulate(float (&acc)[N / 8][4], Ring<L>& ring, int num_steps,
                                           int group) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
  int last = 0;
  for (int step = 0; step < num_steps; ++step) {
    mbarrier_wait(ring.full_barrier(), ring.parity);
    multiply<T, L, N, kAtoms>(acc, ring.address(), group);
    multiply_wait_last();
    if (step > 0 && is_first_lane) ring.release(last);
    last = ring.stage;
    ring.advance();
  }
  multiply_wait_all();
  if (is_first_lane) ring.release(last);
}

}  // namespace dflash::gemm
