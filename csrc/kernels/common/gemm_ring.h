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

}  // namespace dflash::gemm
