// SPDX-License-Identifier: Apache-2.0
// y [T, M] = x [T, K] weight [M, K]^T for at most 128 rows, at the rate the weights arrive.
// Operands are swapped: 64 rows of the weight are a warpgroup's M, the rows of x (N of them, padded
// with zeros) its N. A CTA owns tiles of 64 W weight rows; one warp keeps a ring of stages full
// with bulk copies, W warpgroups multiply. With two splits, a pair of CTAs halves K and each
// finishes half of the rows. Weights of the first stages are asked for before the kernel waits for
// its predecessor, which must not write them.
// Bytes moved: the weight once, x once a tile (from the L2), y once.
#pragma once

#include "fp8_weight.h"
#include "gemm_plan.h"
#include "mma.h"
#include "overlap.h"
#include "tma.h"
#include "wgmma.h"

namespace dflash::gemm {

constexpr int kAtom = 64;         // K elements of a swizzled row of 128 bytes
constexpr int kSplitUnit = 128;   // K elements: where K may be split, whatever the stages hold
constexpr int kGroupRows = 64;    // weight rows of a warpgroup

// What the host decides for a launch.
struct Plan {
  int num_rows;
  int num_tiles;
  int num_atoms;   // of K
  int num_splits;  // 1 or 2
  int num_stages;
};

// N rows of x, W warpgroups, kAtoms atoms of K a stage, and what a warpgroup's epilogue needs.
template <int N, int W, int kAtoms, class Epilogue>
struct Layout {
  static constexpr int kConsumers = 128 * W;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kEpilogueBytes = Epilogue::kBytes;
  static constexpr int kWeightAtomBytes = W * kGroupRows * kAtom * (Epilogue::kPacked ? 1 : 2);
  static constexpr int kRowsAtomBytes = N * 128;
  static constexpr int kRowsAt = kAtoms * kWeightAtomBytes;
  static constexpr int kStageBytes = kRowsAt + kAtoms * kRowsAtomBytes;
  static constexpr int kSumBytes = kConsumers * N / 4 * 4;  // half of a thread's accumulators
  // After the ring: with one split the epilogue's place, so that the ring fills meanwhile; with two
  // what the other CTA sends, and the epilogue's place lies over the ring.
  static constexpr int extra_bytes(int num_splits) {
    return num_splits == 1 ? W * kEpilogueBytes : kSumBytes;
  }
  static constexpr int epilogue_at(int num_splits, int num_stages, int group) {
    return (num_splits == 1 ? num_stages * kStageBytes : 0) + group * kEpilogueBytes;
  }
  static constexpr int smem_bytes(int num_splits, int num_stages) {
    return num_stages * (kStageBytes + 16) + extra_bytes(num_splits) + 16;
  }
};

// A CTA's view of its work: the same tiles for both splits.
struct Work {
  int split;
  int first_tile, tile_step;
  int first_atom, num_steps, num_turns;

  template <int kAtoms>
  __device__ __forceinline__ static Work find(const Plan& plan) {
    Work w;
    w.split = plan.num_splits == 1 ? 0 : static_cast<int>(blockIdx.x & 1);
    w.first_tile = static_cast<int>(blockIdx.x) / plan.num_splits;
    w.tile_step = static_cast<int>(gridDim.x) / plan.num_splits;
    constexpr int kUnit = kSplitUnit / kAtom;
    const int units = (plan.num_atoms + kUnit - 1) / kUnit;
    w.first_atom = units * w.split / plan.num_splits * kUnit;
    const int end = min(units * (w.split + 1) / plan.num_splits * kUnit, plan.num_atoms);
    w.num_steps = (end - w.first_atom + kAtoms - 1) / kAtoms;
    const int num_tiles = (plan.num_tiles - w.first_tile + w.tile_step - 1) / w.tile_step;
    w.num_turns = num_tiles * w.num_steps;
    return w;
  }
};

// The ring's place in shared memory, and where one of its users stands.
template <class L>
struct Ring {
  uint32_t stages, full, empty;
  uint32_t sums;  // counts what the other CTA sends
  int num_stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Ring(const Plan& plan, uint32_t smem)
      : stages(smem),
        full(smem + plan.num_stages * L::kStageBytes + L::extra_bytes(plan.num_splits)),
        empty(full + 8 * plan.num_stages),
        sums(empty + 8 * plan.num_stages),
        num_stages(plan.num_stages) {}

  __device__ __forceinline__ uint32_t address() const { return stages + stage * L::kStageBytes; }
  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
  __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * stage; }
  __device__ __forceinline__ void advance() {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// One thread: the tiles' weights and rows, stage by stage.
template <class L, int W, int kAtoms, class Epilogue>
struct Producer {
  const CUtensorMap &weight, &x;
  const Work work;
  const uint64_t once = evict_first_policy(), keep = evict_last_policy();
  int tile, step = 0;

  __device__ __forceinline__ Producer(const CUtensorMap& weight, const CUtensorMap& x,
                                      const Work& work)
      : weight(weight), x(x), work(work), tile(work.first_tile) {}

  __device__ __forceinline__ void load_weight(const Ring<L>& ring) {
    mbarrier_arrive_expect(ring.full_barrier(), L::kStageBytes);
    if constexpr (Epilogue::kPacked) {
      const int atom = work.first_atom + step * kAtoms;
      tma_load(ring.address(), weight, ring.full_barrier(), once, 0, 0, atom, tile * W);
    } else {
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        const int k = (work.first_atom + step * kAtoms + a) * kAtom;
        const uint32_t to = ring.address() + a * L::kWeightAtomBytes;
        if constexpr (Epilogue::kInterleaved) {
          tma_load(to, weight, ring.full_barrier(), once, k, 0, 0, tile * (W * kGroupRows / 16));
        } else {
          tma_load(to, weight, ring.full_barrier(), once, k, tile * (W * kGroupRows));
        }
      }
    }
  }

  __device__ __forceinline__ void load_rows(const Ring<L>& ring, int at) const {
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      tma_load(ring.address() + L::kRowsAt + a * L::kRowsAtomBytes, x, ring.full_barrier(), keep,
               (work.first_atom + at * kAtoms + a) * kAtom, 0);
    }
  }

  __device__ __forceinline__ void next() {
    if (++step < work.num_steps) return;
    step = 0;
    tile += work.tile_step;
  }

  // The first turn of the ring, without what the predecessor writes.
  __device__ __forceinline__ void start(Ring<L> ring) {
    for (int turn = 0; turn < min(work.num_turns, ring.num_stages); ++turn) {
      load_weight(ring);
      next();
      ring.advance();
    }
  }

  __device__ __forceinline__ void finish(Ring<L> ring) {
    const int started = min(work.num_turns, ring.num_stages);
    for (int turn = 0, at = 0; turn < started; ++turn) {
      load_rows(ring, at);
      if (++at == work.num_steps) at = 0;
      ring.advance();
    }
    ring.parity = 0;
    for (int turn = started; turn < work.num_turns; ++turn) {
      mbarrier_wait(ring.empty_barrier(), ring.parity);
      load_weight(ring);
      load_rows(ring, step);
      next();
      ring.advance();
    }
  }
};

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

// NOTE: the portable body. The host launches it nowhere yet: sm_100f has the library's GEMM.
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
  uint32_t last = 0;
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
      if (a == 1 && step > 0 && lane == 0) mbarrier_arrive(last);
      uint32_t weights[kAtom / 16][4];
      widen_atom<T>(weights, packed[a]);
      multiply_atom<T, N>(acc, weights, stage + L::kRowsAt + a * L::kRowsAtomBytes);
    }
    last = ring.empty_barrier();
    ring.advance();
  }
  multiply_wait_all();
  if (lane == 0) mbarrier_arrive(last);
}

// A tile's products into acc; every stage is given back once its products are done.
template <typename T, class L, int N, int kAtoms>
__device__ __forceinline__ void accumulate(float (&acc)[N / 8][4], Ring<L>& ring, int num_steps,
                                           int group) {
  const bool is_first_lane = threadIdx.x % 32 == 0;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
  uint32_t last = 0;
  for (int step = 0; step < num_steps; ++step) {
    mbarrier_wait(ring.full_barrier(), ring.parity);
    multiply<T, L, N, kAtoms>(acc, ring.address(), group);
    multiply_wait_last();
    if (step > 0 && is_first_lane) mbarrier_arrive(last);
    last = ring.empty_barrier();
    ring.advance();
  }
  multiply_wait_all();
  if (is_first_lane) mbarrier_arrive(last);
}

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

// Epilogue: kInterleaved (8 rows of the weight's first half and 8 of its second take turns, through
// a tensor map that says so), kPacked (the weight is fp8_weight.h's, and of_tile(column), called
// before the products and before the predecessor is done, has finish), kBytes of shared memory a
// warpgroup, and
// finish<kFirst, kRows>(acc, num_rows, column, smem): rows kFirst.. of a warpgroup's 64 columns of
// the product, as the fragments of mma.sync m16n8k16 with the columns as M.
// With kHasState, for one split only: begin<N, W>(num_rows, smem) and end<N, W>(num_rows, smem) of
// all W warpgroups before and after a CTA's tiles, with the place of the first warpgroup; those of
// the others follow it.
template <typename T, int N, int W, int kAtoms, class Epilogue>
__global__ void __launch_bounds__(128 * W + 32, N <= 32 && W != 2 && !Epilogue::kPacked ? 2 : 1)
    gemm_kernel(const __grid_constant__ CUtensorMap weight, const __grid_constant__ CUtensorMap x,
                const Plan plan, const __grid_constant__ Epilogue epilogue) {
  using L = Layout<N, W, kAtoms, Epilogue>;
  extern __shared__ __align__(1024) uint8_t smem[];
  let_successor_start();
  const bool has_pair = !Epilogue::kHasState && plan.num_splits == 2;
  const Work work = Work::find<kAtoms>(plan);
  Ring<L> ring(plan, smem_address(smem));
  const int warp = threadIdx.x / 32;
  const bool produces = warp == 4 * W && threadIdx.x % 32 == 0;
  Producer<L, W, kAtoms, Epilogue> producer(weight, x, work);
  if (produces) {
    for (int stage = 0; stage < plan.num_stages; ++stage) {
      mbarrier_init(ring.full + 8 * stage, 1);
      mbarrier_init(ring.empty + 8 * stage, 4 * W);
    }
    mbarrier_init(ring.sums, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(ring.sums, L::kSumBytes);
    producer.start(ring);
  }
  __syncwarp();
  __syncthreads();
  if (has_pair) cluster_arrive_relaxed();

  if (warp == 4 * W) {
    if (produces) {
      wait_for_predecessor();
      producer.finish(ring);
    }
    __syncwarp();
    if (has_pair) cluster_wait_acquire();
    return;
  }

  const int group = threadIdx.x / 128;
  float acc[N / 8][4];
  [[maybe_unused]] uint8_t* const places = smem + L::epilogue_at(1, plan.num_stages, 0);
  if constexpr (Epilogue::kHasState) epilogue.template begin<N, W>(plan.num_rows, places);
  for (int tile = work.first_tile; tile < plan.num_tiles; tile += work.tile_step) {
    const auto& outputs = of_tile(epilogue, (tile * W + group) * kGroupRows);
    if constexpr (Epilogue::kPacked) {
      accumulate_packed<T, L, N, kAtoms>(acc, ring, work.num_steps, group);
    } else {
      accumulate<T, L, N, kAtoms>(acc, ring, work.num_steps, group);
    }
    const int column = (tile * W + group) * kGroupRows;
    uint8_t* place = smem + L::epilogue_at(plan.num_splits, plan.num_stages, group);
    if (!has_pair) {
      outputs.template finish<0, N>(acc, plan.num_rows, column, place);
      continue;
    }
    if constexpr (!Epilogue::kHasState) {
      if (work.split == 0) {
        exchange<L, N, 0>(acc, ring);
        outputs.template finish<0, N / 2>(acc, plan.num_rows, column, place);
      } else {
        exchange<L, N, 1>(acc, ring);
        outputs.template finish<N / 2, N / 2>(acc, plan.num_rows, column, place);
      }
      return;
    }
  }
  if constexpr (Epilogue::kHasState) epilogue.template end<N, W>(plan.num_rows, places);
}

}  // namespace dflash::gemm
