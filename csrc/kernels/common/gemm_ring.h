// SPDX-License-Identifier: Apache-2.0
// What a CTA of the streaming GEMM owns (gemm_mainloop.h): its layout of shared memory, its work,
// its ring of stages, and the thread that keeps the ring full.
#pragma once

#include "gemm_plan.h"
#include "tma.h"

namespace dflash::gemm {

constexpr int kAtom = 64;         // K elements of a swizzled row of 128 bytes
constexpr int kSplitUnit = 128;   // K elements: where K may be split, whatever the stages hold
constexpr int kGroupRows = 64;    // weight rows of a warpgroup

// What the host decides for a launch.
struct Plan {
  int num_rows;
  int num_units;    // tiles, each for all rows, or for two blocks of N rows
  int block_pairs;  // of blocks: the units of a tile
  int num_atoms;    // of K
  int num_splits;   // 1 or 2
  int num_stages;
};

// N rows of x, W warpgroups, kAtoms atoms of K a stage, and what a warpgroup's epilogue needs.
// kSharesWeight: pairs of CTAs, without splits, take neighbouring blocks of N rows; of the weight
// each reads half for both.
template <int N, int W, int kAtoms, bool kShared, class Epilogue>
struct Layout {
  static constexpr bool kSharesWeight = kShared;
  static constexpr int kRows = N;
  static constexpr int kConsumers = 128 * W;
  static constexpr int kThreads = kConsumers + 32;
  // With few rows registers are left for a small kernel that starts early; packed weights, and the
  // two warpgroups that store context K/V, need them.
  static constexpr int kCtasPerSm = N <= 32 && W != 2 && !Epilogue::kPacked ? 2 : 1;
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

// Of the CTAs that share, or that split K.
__device__ __forceinline__ int rank_in_pair() { return static_cast<int>(blockIdx.x & 1); }

// A CTA's view of its work: the same tiles for both CTAs of a pair.
struct Work {
  int split;
  int first_unit, unit_step, block_pairs;
  int first_atom, num_steps, num_turns;

  template <class L, int kAtoms>
  __device__ __forceinline__ static Work find(const Plan& plan) {
    Work w;
    w.split = plan.num_splits == 1 ? 0 : rank_in_pair();
    // CTAs that take the same units.
    const int together = L::kSharesWeight ? 2 : plan.num_splits;
    w.first_unit = static_cast<int>(blockIdx.x) / together;
    w.unit_step = static_cast<int>(gridDim.x) / together;
    w.block_pairs = plan.block_pairs;
    constexpr int kUnit = kSplitUnit / kAtom;
    const int k_units = (plan.num_atoms + kUnit - 1) / kUnit;
    w.first_atom = k_units * w.split / plan.num_splits * kUnit;
    const int end = min(k_units * (w.split + 1) / plan.num_splits * kUnit, plan.num_atoms);
    w.num_steps = (end - w.first_atom + kAtoms - 1) / kAtoms;
    const int num_units = (plan.num_units - w.first_unit + w.unit_step - 1) / w.unit_step;
    w.num_turns = num_units * w.num_steps;
    return w;
  }
};

// A CTA's tile and its first row of x, which is the same for all of a CTA's units: a multiple of
// block_pairs pairs of CTAs take turns.
template <class L>
struct Part {
  int tile, row;

  __device__ __forceinline__ Part(const Work& work, int unit) : tile(unit), row(0) {
    if constexpr (L::kSharesWeight) {
      tile = unit / work.block_pairs;
      row = ((unit - tile * work.block_pairs) * 2 + rank_in_pair()) * L::kRows;
    }
  }
};

// The ring's place in shared memory, and where one of its users stands.
template <class L>
struct Ring {
  uint32_t stages, full, empty;
  uint32_t sums;  // counts what the other CTA sends
  uint32_t other_empty = 0;  // of the CTA that shares with this one
  int num_stages;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ Ring(const Plan& plan, uint32_t smem)
      : stages(smem),
        full(smem + plan.num_stages * L::kStageBytes + L::extra_bytes(plan.num_splits)),
        empty(full + 8 * plan.num_stages),
        sums(empty + 8 * plan.num_stages),
        num_stages(plan.num_stages) {
    if constexpr (L::kSharesWeight) other_empty = cluster_address(empty, 1 - rank_in_pair());
  }

  __device__ __forceinline__ uint32_t address() const { return stages + stage * L::kStageBytes; }
  __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * stage; }
  __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * stage; }
  // One thread of a warp that is done with a stage, which may hold what the other CTA sends.
  __device__ __forceinline__ void release(int done) const {
    mbarrier_arrive(empty + 8 * done);
    if constexpr (L::kSharesWeight) mbarrier_arrive_cluster(other_empty + 8 * done);
  }
  __device__ __forceinline__ void advance() {
    if (++stage < num_stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Where the copies stand: a step of K of a unit.
template <class L>
struct Cursor {
  int unit, step = 0;
  Part<L> part;

  __device__ __forceinline__ explicit Cursor(const Work& work)
      : unit(work.first_unit), part(work, work.first_unit) {}

  __device__ __forceinline__ void next(const Work& work) {
    if (++step < work.num_steps) return;
    step = 0;
    unit += work.unit_step;
    part = Part<L>(work, unit);
  }
};

// One thread: the tiles' weights and rows, stage by stage.
template <class L, int W, int kAtoms, class Epilogue>
struct Producer {
  const CUtensorMap &weight, &x;
  const Work work;
  const uint64_t once = evict_first_policy(), keep = evict_last_policy();
  Cursor<L> at;

  __device__ __forceinline__ Producer(const CUtensorMap& weight, const CUtensorMap& x,
                                      const Work& work)
      : weight(weight), x(x), work(work), at(work) {}

  __device__ __forceinline__ void load_weight(const Ring<L>& ring) {
    mbarrier_arrive_expect(ring.full_barrier(), L::kStageBytes);
    if constexpr (Epilogue::kPacked) {
      const int atom = work.first_atom + at.step * kAtoms;
      tma_load(ring.address(), weight, ring.full_barrier(), once, 0, 0, atom, at.part.tile * W);
    } else {
#pragma unroll
      for (int a = 0; a < kAtoms; ++a) {
        const int k = (work.first_atom + at.step * kAtoms + a) * kAtom;
        const uint32_t to = ring.address() + a * L::kWeightAtomBytes;
        constexpr int kTurns = W * kGroupRows / 16;  // of 8 rows of either half, if interleaved
        if constexpr (L::kSharesWeight && !Epilogue::kInterleaved) {
          constexpr int kHalf = W * kGroupRows / 2;
          const int first = rank_in_pair() * kHalf;
          tma_load_pair(to + first * 128, weight, ring.full_barrier(), once, k,
                        at.part.tile * (W * kGroupRows) + first);
        } else if constexpr (L::kSharesWeight) {
          const int half = rank_in_pair() * (kTurns / 2);
          tma_load_pair(to + half * 2048, weight, ring.full_barrier(), once, k, 0, 0,
                        at.part.tile * kTurns + half);
        } else if constexpr (Epilogue::kInterleaved) {
          tma_load(to, weight, ring.full_barrier(), once, k, 0, 0, at.part.tile * kTurns);
        } else {
          tma_load(to, weight, ring.full_barrier(), once, k, at.part.tile * (W * kGroupRows));
        }
      }
    }
  }

  __device__ __forceinline__ void load_rows(const Ring<L>& ring, const Cursor<L>& from) const {
#pragma unroll
    for (int a = 0; a < kAtoms; ++a) {
      const uint32_t to = ring.address() + L::kRowsAt + a * L::kRowsAtomBytes;
      const int k = (work.first_atom + from.step * kAtoms + a) * kAtom;
      tma_load(to, x, ring.full_barrier(), keep, k, from.part.row);
    }
  }

  // The first turn of the ring, without what the predecessor writes.
  __device__ __forceinline__ void start(Ring<L> ring) {
    for (int turn = 0; turn < min(work.num_turns, ring.num_stages); ++turn) {
      load_weight(ring);
      at.next(work);
      ring.advance();
    }
  }

  __device__ __forceinline__ void finish(Ring<L> ring) {
    const int started = min(work.num_turns, ring.num_stages);
    Cursor<L> from(work);
    for (int turn = 0; turn < started; ++turn) {
      load_rows(ring, from);
      from.next(work);
      ring.advance();
    }
    ring.parity = 0;
    for (int turn = started; turn < work.num_turns; ++turn) {
      mbarrier_wait(ring.empty_barrier(), ring.parity);
      load_weight(ring);
      load_rows(ring, at);
      at.next(work);
      ring.advance();
    }
    if constexpr (L::kSharesWeight) drain(ring, started);
  }

  // Until the pair's consumers are done with the last `count` turns: what the other CTA sends to
  // this one has arrived then, and this one may end.
  __device__ __forceinline__ void drain(Ring<L> ring, int count) const {
    if (work.num_turns < ring.num_stages) ring.stage = 0;
    for (int i = 0; i < count; ++i) {
      mbarrier_wait(ring.empty_barrier(), ring.parity);
      ring.advance();
    }
  }
};

}  // namespace dflash::gemm
