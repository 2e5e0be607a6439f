// SPDX-License-Identifier: Apache-2.0
// y [T, M] = x [T, K] weight [M, K]^T for few rows, at the rate the weights arrive.
// Operands are swapped: 64 rows of the weight are a warpgroup's M, the rows of x (N of them, padded
// with zeros) its N. A CTA owns tiles of 64 W weight rows; one warp keeps a ring of stages full
// with bulk copies, W warpgroups multiply. With two splits, a pair of CTAs halves K and each
// finishes half of the rows. Weights of the first stages are asked for before the kernel waits for
// its predecessor, which must not write them. With more rows than N, pairs of CTAs take a block of
// N rows each and share the weight, each half read by one of them.
// Bytes moved: the weight once (a pair of row blocks), x once a tile (from the L2), y once.
#pragma once

#include <type_traits>

#include "gemm_multiply.h"
#include "overlap.h"

namespace dflash::gemm {

// The rows that the other CTA finishes go into its shared memory, and what it sent is added: a sum
// of two has one order. kMine is this CTA's half.
template <class L, int N, int kMine>
__device__ __forceinline__ void exchange(float (&acc)[N / 8][4], const Ring<L>& ring) {
  constexpr int kHalf = N / 16;
  const uint32_t mine = ring.stages + ring.num_stages * L::kStageBytes + threadIdx.x * 16;
  const uint32_t theirs = cluster_address(mine, 1 - kMine);
  const uint32_t barrier = cluster_address(ring.sums, 1 - kMine);
  cluster_wait_acquire();  // the other CTA runs
#pragma unroll
  for (int j = 0; j < kHalf; ++j)
    store_async(theirs + j * (L::kConsumers * 16), barrier, acc[(1 - kMine) * kHalf + j]);
  mbarrier_wait_cluster(ring.sums, 0);
  // The epilogue's place lies over the ring, of which other warpgroups may still read.
  if constexpr (L::kConsumers > 128) named_barrier(1 + L::kConsumers / 128, L::kConsumers);
#pragma unroll
  for (int j = 0; j < kHalf; ++j) {
    float sent[4];
    load_shared_float4(sent, mine + j * (L::kConsumers * 16));
#pragma unroll
    for (int r = 0; r < 4; ++r) acc[kMine * kHalf + j][r] += sent[r];
  }
}

// What finishes a tile, with what it needs of memory already asked for where weights are packed.
template <class Epilogue>
__device__ __forceinline__ decltype(auto) of_tile(const Epilogue& epilogue, int column) {
  if constexpr (Epilogue::kPacked) {
    return epilogue.of_tile(column);
  } else {
    return (epilogue);
  }
}

// The epilogue of a CTA's rows.
template <bool kSharesWeight, class Epilogue>
__device__ __forceinline__ decltype(auto) of_rows(const Epilogue& epilogue, int row) {
  if constexpr (kSharesWeight) {
    return epilogue.from_row(row);
  } else {
    return (epilogue);
  }
}

struct NoState {};

template <int N, int W, class Epilogue>
__device__ __forceinline__ auto begin(const Epilogue& epilogue, int num_rows, uint8_t* places) {
  if constexpr (Epilogue::kHasState) {
    return epilogue.template begin<N, W>(num_rows, places);
  } else {
    return NoState{};
  }
}

// take_tiles(epilogue) with the one that serves the CTA's rows.
template <int W, bool kSharesWeight, class Epilogue, class TakeTiles>
__device__ __forceinline__ void with_epilogue(const Epilogue& epilogue, int row, int num_rows,
                                              const TakeTiles& take_tiles) {
  if constexpr (Epilogue::kHasState) {
    epilogue.template choose<W>(row, num_rows, take_tiles);
  } else {
    take_tiles(of_rows<kSharesWeight>(epilogue, row));
  }
}

// Epilogue: kInterleaved (8 rows of the weight's first half and 8 of its second take turns, through
// a tensor map that says so), kPacked (the weight is fp8_weight.h's, and of_tile(column), called
// before the products and before the predecessor is done, has finish), kBytes of shared memory a
// warpgroup, from_row(row) where the weight is shared (the epilogue of the rows from there on), and
// finish<kFirst, kRows>(acc, num_rows, column, smem): rows kFirst.. of a warpgroup's 64 columns of
// the product, as the fragments of mma.sync m16n8k16 with the columns as M.
// With kHasState, for one split only: choose<W>(row, num_rows, take_tiles), which calls take_tiles
// with what serves the rows from `row` on: begin<N, W>(num_rows, smem), which returns a thread's
// state that finish is also given, and end<N, W>(state, num_rows, smem) of all W warpgroups before
// and after a CTA's tiles, with the place of the first warpgroup; those of the others follow it.
// num_rows are those of the CTA, at most N.
template <typename T, int N, int W, int kAtoms, bool kSharesWeight, class Epilogue>
__global__ void __launch_bounds__(128 * W + 32,
                                  Layout<N, W, kAtoms, kSharesWeight, Epilogue>::kCtasPerSm)
    gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                const Plan plan, const __grid_constant__ Epilogue epilogue) {
  using L = Layout<N, W, kAtoms, kSharesWeight, Epilogue>;
  static_assert(!kSharesWeight || !Epilogue::kPacked);
  extern __shared__ __align__(1024) uint8_t smem[];
  let_successor_start();
  const bool has_pair = !Epilogue::kHasState && !kSharesWeight && plan.num_splits == 2;
  const Work work = Work::find<L, kAtoms>(plan);
  Ring<L> ring(plan, smem_address(smem));
  const int warp = threadIdx.x / 32;
  const bool produces = warp == 4 * W && threadIdx.x % 32 == 0;
  Producer<L, W, kAtoms, Epilogue> producer(weight, x, work);
  if (produces) {
    for (int stage = 0; stage < plan.num_stages; ++stage) {
      mbarrier_init(ring.full + 8 * stage, 1);
      mbarrier_init(ring.empty + 8 * stage, kSharesWeight ? 8 * W : 4 * W);
    }
    mbarrier_init(ring.sums, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(ring.sums, L::kSumBytes);
    if constexpr (!kSharesWeight) producer.start(ring);
  }
  __syncwarp();
  __syncthreads();
  if (has_pair || kSharesWeight) cluster_arrive_relaxed();

  if (warp == 4 * W) {
    if constexpr (kSharesWeight) cluster_wait_acquire();  // the other CTA's barriers are ready
    if (produces) {
      if constexpr (kSharesWeight) producer.start(ring);
      wait_for_predecessor();
      producer.finish(ring);
    }
    __syncwarp();
    if (has_pair) cluster_wait_acquire();
    return;
  }

  const int group = threadIdx.x / 128;
  if constexpr (kSharesWeight) cluster_wait_acquire();
  float acc[N / 8][4];
  [[maybe_unused]] uint8_t* const places = smem + L::epilogue_at(1, plan.num_stages, 0);
  const int row = Part<L>(work, work.first_unit).row;
  // Elsewhere a CTA has all rows: their number needs no register.
  constexpr bool kClips = kSharesWeight || Epilogue::kHasState;
  const int num_rows = kClips ? min(plan.num_rows - row, N) : plan.num_rows;
  with_epilogue<W, kSharesWeight>(epilogue, row, num_rows, [&](const auto& mine) {
    using Mine = std::decay_t<decltype(mine)>;
    [[maybe_unused]] auto state = begin<N, W>(mine, num_rows, places);
    for (int unit = work.first_unit; unit < plan.num_units; unit += work.unit_step) {
      const int column = (Part<L>(work, unit).tile * W + group) * kGroupRows;
      const auto& outputs = of_tile(mine, column);
      if constexpr (Mine::kPacked) {
        accumulate_packed<T, L, N, kAtoms>(acc, ring, work.num_steps, group);
      } else {
        accumulate<T, L, N, kAtoms>(acc, ring, work.num_steps, group);
      }
      uint8_t* place = smem + L::epilogue_at(plan.num_splits, plan.num_stages, group);
      if (!has_pair) {
        if constexpr (Mine::kHasState) {
          mine.template finish<0, N>(acc, state, num_rows, column, place);
        } else {
          outputs.template finish<0, N>(acc, num_rows, column, place);
        }
        continue;
      }
      if constexpr (!Mine::kHasState) {
        if (work.split == 0) {
          exchange<L, N, 0>(acc, ring);
          outputs.template finish<0, N / 2>(acc, num_rows, column, place);
        } else {
          exchange<L, N, 1>(acc, ring);
          outputs.template finish<N / 2, N / 2>(acc, num_rows, column, place);
        }
        return;
      }
    }
    if constexpr (Mine::kHasState) mine.template end<N, W>(state, num_rows, places);
  });
}

}  // namespace dflash::gemm
