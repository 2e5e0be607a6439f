// SPDX-License-Identifier: Apache-2.0
// precompute_context_kv for few rows: the streaming GEMM (common/gemm_mainloop.h) over tiles of 128
// outputs, one head or two, rounded as if they had been stored. They pass through shared memory, 32
// rows at a time, where 16 lanes own a head of a row and do what precompute_context_kv.cu does.
// Rows without a slot stop there. Bytes moved: the weight once, K and V of the stored rows once.
#include "common/context_head.h"
#include "common/gemm_launch.h"

namespace dflash {
namespace {

constexpr int kWarpgroups = 2;
constexpr int kThreads = 128 * kWarpgroups;
constexpr int kTileOutputs = kWarpgroups * gemm::kGroupRows;
constexpr int kPieceRows = 32;            // that pass through shared memory at once
constexpr int kPitch = kTileOutputs + 8;  // 16-byte rows without bank conflicts
constexpr int kLanes = 16;
constexpr int kBothGroups = 1 + kWarpgroups;  // a named barrier
constexpr int64_t kMaxRows = 64;  // with more, a library GEMM and a kernel that stores win

template <typename T>
struct ContextKvEpilogue {
  static constexpr bool kInterleaved = false, kHasState = false, kPacked = false;
  static constexpr int kStagedBytes = kPieceRows * kPitch * 2;
  static constexpr int kScratchBytes = kThreads / kLanes * kTileOutputs * 4;
  static constexpr int kBytes = (kStagedBytes + kScratchBytes) / kWarpgroups;

  PrecomputeContextKvParams p;

  template <int kFirst, int kRows, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], int num_rows,
                                         int column, uint8_t* place) const {
    constexpr int kPiece = kRows < kPieceRows ? kRows : kPieceRows;
    const int group = threadIdx.x / 128;
    T* staged = reinterpret_cast<T*>(place - group * kBytes);
    wait_for_predecessor();  // slots and positions are somebody's output
    const int end = min(num_rows, kFirst + kRows);
#pragma unroll 1
    for (int first = kFirst; first < end; first += kPiece) {
      named_barrier(kBothGroups, kThreads);  // the rows before are read
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        if (kFirst + j * 8 / kPiece * kPiece == first)
          stage(acc[kFirst / 8 + j], j * 8 % kPiece, group, staged);
      }
      named_barrier(kBothGroups, kThreads);
      store(first, min(end, first + kPiece), column / kTileOutputs * kTileOutputs, staged);
    }
  }

  __device__ __forceinline__ static void stage(const float (&fragment)[4], int row, int group,
                                               T* staged) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int at = group * gemm::kGroupRows + warp * 16 + lane / 8 % 2 * 8;
    const uint32_t packed[2] = {pack2<T>(fragment[0], fragment[1]),
                                pack2<T>(fragment[2], fragment[3])};
    stmatrix_trans(smem_address(staged + (row + lane % 8) * kPitch + at), packed);
  }

  // Rows first .. end of the heads from output `column` on.
  __device__ __forceinline__ void store(int first, int end, int column, T* staged) const {
    const int group = threadIdx.x / kLanes;
    float* scratch = reinterpret_cast<float*>(staged + kPieceRows * kPitch) + group * kTileOutputs;
    // K and V make it an even number of heads: a tile is never short of one.
    const int heads = kTileOutputs / p.head_dim, head = column / p.head_dim + group % heads;
#pragma unroll 1
    for (int row = first + group / heads; row < end; row += kThreads / kLanes / heads) {
      const T* x = staged + (row - first) * kPitch + group % heads * p.head_dim;
      if (p.cache_dtype == DType::kFloat8E4M3) {
        store_context_head<kVec<T>, kLanes, Float8E4M3>(p, row, head, x, scratch);
      } else {
        store_context_head<kVec<T>, kLanes, T>(p, row, head, x, scratch);
      }
      __syncwarp(lane_group_mask<kLanes>());  // scratch is read
    }
    __syncwarp();
  }
};

template <typename T>
cudaError_t launch(const PrecomputeContextKvParams& p, cudaStream_t stream) {
  const ContextKvEpilogue<T> epilogue{p};
  const gemm::Choice c = gemm::choose_pairs(p.product);
  switch (c.rows) {
    case 16: return gemm::launch_shape<T, 16, kWarpgroups>(p.product, c.splits, epilogue, stream);
    case 32: return gemm::launch_shape<T, 32, kWarpgroups>(p.product, c.splits, epilogue, stream);
    default: return gemm::launch_shape<T, 64, kWarpgroups>(p.product, c.splits, epilogue, stream);
  }
}

}  // namespace

bool can_project_context_kv(const PrecomputeContextKvParams& p) {
  if (p.num_rows > kMaxRows || !gemm::can_stream(p.product)) return false;
  if (p.head_dim != 64 && p.head_dim != 128) return false;
  return p.cache_dtype == DType::kFloat8E4M3 ? context_is_vectorizable<BFloat16, Float8E4M3>(p)
                                             : context_is_vectorizable<BFloat16, BFloat16>(p);
}

cudaError_t launch_project_context_kv(const PrecomputeContextKvParams& params,
                                      cudaStream_t stream) {
  if (device_properties().major != 9 || !can_project_context_kv(params))
    return cudaErrorInvalidValue;
  if (params.dtype == DType::kFloat16) return launch<Half>(params, stream);
  return launch<BFloat16>(params, stream);
}

}  // namespace dflash
