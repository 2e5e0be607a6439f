// SPDX-License-Identifier: Apache-2.0
// Host side of the streaming GEMM: from operands and an epilogue to a launch.
#pragma once

#include <algorithm>

#include "device.h"
#include "gemm_mainloop.h"
#include "gemm_plan.h"
#include "tensor_map.h"

namespace dflash::gemm {

// Leaves room beside a CTA for one of a small kernel that started early.
constexpr int kSmemBytes = 222 << 10;

// A single row's stride names nothing; the encoder wants one that is valid.
inline int64_t map_stride(int64_t rows, int64_t stride, int64_t size) {
  return rows > 1 ? stride : (size + 7) / 8 * 8;
}

inline cudaError_t make_rows_map(CUtensorMap* map, DType dtype, const void* base, int64_t rows,
                                 int64_t size, int64_t stride, int box_rows) {
  return make_tensor_map(
      map, dtype, base, {{size, 1, kAtom}, {rows, map_stride(rows, stride, size), box_rows}});
}

// 8 rows of the first half, 8 of the second, and so on.
inline cudaError_t make_interleaved_map(CUtensorMap* map, const Operands& o, int box_rows) {
  const int64_t half = o.num_outputs / 2;
  return make_tensor_map(map, o.dtype, o.weight,
                         {{o.size, 1, kAtom},
                          {8, o.weight_stride, 8},
                          {2, half * o.weight_stride, 2},
                          {half / 8, 8 * o.weight_stride, box_rows / 16}});
}

// Tiles of the packed weight, each 8 rows of 512 bytes.
inline cudaError_t make_packed_map(CUtensorMap* map, const Operands& o, int warpgroups,
                                   int num_atoms) {
  constexpr int kRow = 256, kTile = fp8::kTileBytes / 2;  // of two bytes each
  const int64_t atoms = fp8::num_tiles(o.size), groups = fp8::num_tiles(o.num_outputs);
  return make_tensor_map(map, o.dtype, o.weight,
                         {{kRow, 1, kRow},
                          {kTile / kRow, kRow, kTile / kRow},
                          {atoms, kTile, num_atoms},
                          {groups, atoms * kTile, warpgroups}},
                         TensorMapSwizzle::kNone);
}

inline int num_tiles(int64_t num_outputs, int warpgroups) {
  const int tile_rows = warpgroups * kGroupRows;
  return static_cast<int>((num_outputs + tile_rows - 1) / tile_rows);
}

// Blocks of x that CTAs of a launch keep to, in turns: pairs of them where the weight is shared.
inline int num_row_blocks(int64_t num_rows, int block_rows, bool shares_weight) {
  return shares_weight ? static_cast<int>((num_rows + 2 * block_rows - 1) / (2 * block_rows)) * 2
                       : 1;
}

// CTAs that take the tiles by turns, for each of the row blocks.
inline int ctas_per_block(int num_tiles, int row_blocks) {
  return std::min(num_tiles, device_properties().num_sms / row_blocks);
}

template <typename T, int N, int W, bool kSharesWeight = false, class Epilogue>
cudaError_t launch_shape(const Operands& o, int num_splits, const Epilogue& epilogue,
                         cudaStream_t stream) {
  constexpr int kAtoms = N <= 32 || Epilogue::kPacked ? 2 : 1;
  using L = Layout<N, W, kAtoms, kSharesWeight, Epilogue>;
  const auto kernel = gemm_kernel<T, N, W, kAtoms, kSharesWeight, Epilogue>;

  Plan plan;
  plan.num_rows = static_cast<int>(o.num_rows);
  const int tiles = num_tiles(o.num_outputs, W);
  const int row_blocks = num_row_blocks(o.num_rows, N, kSharesWeight);
  plan.block_pairs = kSharesWeight ? row_blocks / 2 : 1;
  plan.num_units = tiles * plan.block_pairs;
  plan.num_atoms = static_cast<int>((o.size + kAtom - 1) / kAtom);
  plan.num_splits = num_splits;
  plan.num_stages = (kSmemBytes - L::smem_bytes(num_splits, 0)) / (L::kStageBytes + 16);
  const int smem_bytes = L::smem_bytes(num_splits, plan.num_stages);

  constexpr int kTileRows = W * kGroupRows / (kSharesWeight ? 2 : 1);  // that one CTA reads
  CUtensorMap weight, x;
  cudaError_t error =
      Epilogue::kPacked        ? make_packed_map(&weight, o, W, kAtoms)
      : Epilogue::kInterleaved ? make_interleaved_map(&weight, o, kTileRows)
                               : make_rows_map(&weight, o.dtype, o.weight, o.num_outputs, o.size,
                                               o.weight_stride, kTileRows);
  if (error != cudaSuccess) return error;
  error = make_rows_map(&x, o.dtype, o.x, o.num_rows, o.size, o.x_stride, N);
  if (error != cudaSuccess) return error;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error != cudaSuccess) return error;

  // Weights are asked for while the kernel before this one ends.
  cudaLaunchAttribute attributes[2]{{}, overlap_attribute()};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kSharesWeight ? 2 : num_splits;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(num_splits == 1 ? row_blocks * ctas_per_block(tiles, row_blocks)
                                        : num_splits * tiles);
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, weight, x, plan, epilogue);
}

template <typename T, int N, class Epilogue>
cudaError_t launch_rows(const Operands& o, const Choice& c, const Epilogue& epilogue,
                        cudaStream_t stream) {
  if (c.warpgroups == 3) return launch_shape<T, N, 3>(o, c.splits, epilogue, stream);
  if constexpr (Epilogue::kPacked) {
    if (c.warpgroups == 2) return launch_shape<T, N, 2>(o, c.splits, epilogue, stream);
  }
  return launch_shape<T, N, 1>(o, c.splits, epilogue, stream);
}

template <typename T, class Epilogue>
cudaError_t launch_gemm(const Operands& o, const Epilogue& epilogue, cudaStream_t stream) {
  const Choice c = Epilogue::kPacked ? choose_packed(o) : choose(o);
  switch (c.rows) {
    case 16: return launch_rows<T, 16>(o, c, epilogue, stream);
    case 32: return launch_rows<T, 32>(o, c, epilogue, stream);
    case 64: return launch_rows<T, 64>(o, c, epilogue, stream);
    case 128: return launch_rows<T, 128>(o, c, epilogue, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace dflash::gemm
