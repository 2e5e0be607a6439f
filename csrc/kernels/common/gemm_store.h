// SPDX-License-Identifier: Apache-2.0
// An epilogue that stores: fragments become 16-bit values, are transposed on their way through
// shared memory, and leave as 16 bytes a thread, rows of the output in order.
#pragma once

#include "gemm_mainloop.h"
#include "vec.h"

namespace dflash::gemm {

constexpr int kPieceRows = 32;  // that pass through shared memory at once

// A warp's fragment is two 8 x 8 matrices, of 16 columns of the product: kMatrices = 2 stores both,
// 1 what pack(fragment, packed) made of the two.
template <typename T, int kMatrices>
struct RowStore {
  static constexpr int kColumns = kGroupRows / 2 * kMatrices;
  static constexpr int kPitch = kColumns + 8;  // 16-byte rows without bank conflicts
  static constexpr int kBytes = kPieceRows * kPitch * 2;

  T* output;
  int64_t stride;
  int num_outputs;
  bool aligned;

  RowStore(void* output, int64_t stride, int64_t num_outputs)
      : output(static_cast<T*>(output)),
        stride(stride),
        num_outputs(static_cast<int>(num_outputs)),
        aligned(rows_are_vectorizable<T>(output, stride, kVec<T>)) {}

  // kRows rows from kFirst on; `column` is the first of the warpgroup's in the output.
  template <int kFirst, int kRows, int kFragments, class Pack>
  __device__ __forceinline__ void put(const float (&acc)[kFragments][4], int num_rows, int column,
                                      uint8_t* smem, const Pack& pack) const {
    constexpr int kPiece = kRows < kPieceRows ? kRows : kPieceRows;
    if (kFirst >= num_rows) return;
    const int barrier = 1 + threadIdx.x / 128;
    named_barrier(barrier, 128);  // the piece before has left
#pragma unroll
    for (int j = 0; j < kPiece / 8; ++j) put_fragment(acc[kFirst / 8 + j], j * 8, smem, pack);
    named_barrier(barrier, 128);
    store_piece<kPiece>(kFirst, num_rows, column, smem);
    if constexpr (kRows > kPiece)
      put<kFirst + kPiece, kRows - kPiece>(acc, num_rows, column, smem, pack);
  }

 private:
  template <class Pack>
  __device__ __forceinline__ void put_fragment(const float (&fragment)[4], int row, uint8_t* smem,
                                               const Pack& pack) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int matrix = kMatrices == 2 ? lane / 8 % 2 : 0;
    const int at = (row + lane % 8) * kPitch + (warp * kMatrices + matrix) * 8;
    uint32_t packed[kMatrices];
    pack(fragment, packed);
    stmatrix_trans(smem_address(smem) + at * 2, packed);
  }

  template <int kPiece>
  __device__ __forceinline__ void store_piece(int first_row, int num_rows, int column,
                                              const uint8_t* smem) const {
    constexpr int kChunks = kColumns / 8;
#pragma unroll
    for (int base = 0; base < kPiece * kChunks; base += 128) {
      const int i = base + threadIdx.x % 128, row = i / kChunks, chunk = i % kChunks * 8;
      if (i >= kPiece * kChunks || first_row + row >= num_rows) break;
      const Vec<T, 8> values =
          load_vec<8>(reinterpret_cast<const T*>(smem) + row * kPitch + chunk);
      store(first_row + row, column + chunk, values);
    }
  }

  __device__ __forceinline__ void store(int row, int column, const Vec<T, 8>& values) const {
    T* to = output + row * stride + column;
    if (aligned && column + 8 <= num_outputs) return store_vec<8>(to, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column + i < num_outputs) to[i] = values.x[i];
    }
  }
};

}  // namespace dflash::gemm
