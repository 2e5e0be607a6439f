// SPDX-License-Identifier: Apache-2.0
// How a CTA's steps of K and V come into its ring of stages in shared memory.
#pragma once

#include "attention_merge.h"

namespace dflash::attention {

// Where a byte of K lies in its stage, V kMatrixBytes further: fp8 rows as they are.
template <typename L, int D, int kElementBytes>
__device__ __forceinline__ uint32_t place_of(int row, int column) {
  return kElementBytes == 1 ? row * D + column : L::place(row, column);
}

// K and V rows of a step that no 16-byte copy may touch.
// NOTE: as many turns for every lane: lanes that returned apart met the next barrier apart.
template <typename L, int D, int kElementBytes>
__device__ __noinline__ void copy_rows(uint8_t* key_stage, uint8_t* value_stage,
                                       const SlotOffset* slots, const uint8_t* keys,
                                       const uint8_t* values) {
  constexpr int kRowBytes = D * kElementBytes, kPasses = L::kStepKeys * kRowBytes / kThreads;
  static_assert(L::kStepKeys * kRowBytes % kThreads == 0);
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const int i = threadIdx.x + pass * kThreads, row = i / kRowBytes, column = i % kRowBytes;
    const SlotOffset slot = slots[row];
    const uint32_t at = place_of<L, D, kElementBytes>(row, column);
    key_stage[at] = slot.key < 0 ? 0 : keys[slot.key + column];
    value_stage[at] = slot.value < 0 ? 0 : values[slot.value + column];
  }
}

// Brings a CTA's steps of K and V into the ring. Blocks are looked up before they are needed, slots
// wait in shared memory.
template <typename T, int D, typename L, bool kFp8>
struct Stager {
  const PagedAttentionParams& p;
  const Plan& plan;
  const int32_t* blocks;
  uint8_t* stages;
  SlotOffset* slots;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr int kValueAt = kFp8 ? L::kStepKeys * D : L::kMatrixBytes;  // in a stage
  const uint8_t* key_head = nullptr;
  const uint8_t* value_head = nullptr;
  KeyRange keys{};
  Deal deal{};

  __device__ __forceinline__ Stager(const PagedAttentionParams& params, const Plan& launch_plan,
                                    uint8_t* smem)
      : p(params),
        plan(launch_plan),
        blocks(params.block_table + blockIdx.z * params.block_table_stride),
        stages(smem + L::kStagesAt),
        slots(reinterpret_cast<SlotOffset*>(smem + L::kSlotsAt)) {}

  __device__ __forceinline__ void set_work(const Work& w) {
    key_head = static_cast<const uint8_t*>(p.key_cache) +
               w.kv_head * p.key_strides.head * kElementBytes;
    value_head = static_cast<const uint8_t*>(p.value_cache) +
                 w.kv_head * p.value_strides.head * kElementBytes;
    keys = w.keys;
    deal = w.deal;
  }

  // Key i of the step `step` after step `first`; i may reach into later steps.
  __device__ __forceinline__ int key_of(int first, int step, int i) const {
    return (first + (step + i / L::kStepKeys) * plan.num_ctas()) * L::kStepKeys +
           i % L::kStepKeys;
  }

  // Within the table, whatever the lengths are.
  __device__ __forceinline__ int32_t find_block(int key) const {
    return key < p.mask.max_keys ? blocks[plan.page.quotient(key)] : -1;
  }

  // Keys that no row sees are never read: their page may hold anything.
  __device__ __forceinline__ SlotOffset find_slot(int32_t block, int key) const {
    if (key < keys.begin || key >= keys.end) return kNoSlot;
    return slot_in_block(p, block, plan.page.remainder(key));
  }

  __device__ __forceinline__ uint8_t* raw_stage(int stage) const {
    return stages + L::kStageBytes + stage * 2 * L::kStepKeys * D;
  }

  __device__ __forceinline__ void start_rows(uint8_t* stage, const SlotOffset* step_slots) const {
    constexpr int kChunks = D * kElementBytes / 16, kTotal = L::kStepKeys * kChunks;
    constexpr bool kWholeRows = kThreads % kChunks == 0;  // a thread keeps to its column
    constexpr int kPasses = (kTotal + kThreads - 1) / kThreads;
    constexpr int kBatch = kWholeRows && kPasses >= 4 ? 4 : 1;  // slots read ahead of their use
    constexpr bool kAllBusy = kTotal % kThreads == 0;
    const uint32_t key_stage = smem_address(stage);
#pragma unroll
    for (int first = 0; first < kPasses; first += kBatch) {
      SlotOffset slot[kBatch];
      int row[kBatch], column[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int pass = first + j, i = threadIdx.x + pass * kThreads;
        row[j] = kWholeRows ? threadIdx.x / kChunks + pass * (kThreads / kChunks) : i / kChunks;
        column[j] = (kWholeRows ? threadIdx.x : i) % kChunks * 16;
        if (kAllBusy || i < kTotal) slot[j] = step_slots[row[j]];
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (!kAllBusy && threadIdx.x + (first + j) * kThreads >= kTotal) break;
        const uint32_t at = place_of<L, D, kElementBytes>(row[j], column[j]);
        cp_async_16(key_stage + at, key_head + column[j], slot[j].key);
        cp_async_16(key_stage + kValueAt + at, value_head + column[j], slot[j].value);
      }
    }
  }

  // Copies of a step, none past the last.
  __device__ __forceinline__ void start(int step) const {
    if (step >= deal.count) return;
    const int ring = step % L::kStages;
    const SlotOffset* step_slots = slots + ring * L::kStepKeys;
    uint8_t* stage = kFp8 ? raw_stage(ring) : stages + ring * L::kStageBytes;
    if (plan.cache_aligned) return start_rows(stage, step_slots);
    copy_rows<L, D, kElementBytes>(stage, stage + kValueAt, step_slots, key_head, value_head);
  }

  // Until a step's copies by every thread have arrived.
  template <int kPending>
  __device__ __forceinline__ void wait() const {
    cp_async_wait<kPending>();
    if constexpr (L::kWgmma) fence_async_proxy();
    __syncwarp();  // NOTE: lanes may come apart over their copies; the barrier wants whole warps.
    __syncthreads();
  }

  // K of a step that has arrived, V kMatrixBytes after it.
  __device__ __forceinline__ uint32_t finish(int step) const {
    const int stage = step % L::kStages;
    if constexpr (!kFp8) return smem_address(stages + stage * L::kStageBytes);
    const uint8_t* raw = raw_stage(stage);
#pragma unroll 4
    for (int i = threadIdx.x; i < 2 * L::kStepKeys * D / 8; i += kThreads) {
      const int row = i / (D / 8), column = i % (D / 8) * 8;
      const bool is_key = row < L::kStepKeys;
      uint8_t* to = stages + (is_key ? 0 : L::kMatrixBytes) +
                    L::place(is_key ? row : row - L::kStepKeys, 2 * column);
      const Vec<uint16_t, 4> in =
          load_vec<4>(reinterpret_cast<const uint16_t*>(raw + row * D + column));
      Vec<uint32_t, 4> out;
#pragma unroll
      for (int j = 0; j < 4; ++j) out.x[j] = convert_e4m3x2<T>(in.x[j]);
      store_vec<4>(reinterpret_cast<uint32_t*>(to), out);
    }
    if constexpr (L::kWgmma) fence_async_proxy();
    __syncwarp();
    __syncthreads();
    return smem_address(stages);
  }
};

}  // namespace dflash::attention
