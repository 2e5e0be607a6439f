// SPDX-License-Identifier: Apache-2.0
// Attention of one tile of packed rows (query rows x heads of one K/V group), its keys dealt to the
// CTAs of a cluster. A CTA streams its steps of keys through a ring of stages in shared memory. In
// a 64-row tile a warp owns 16 rows and a split is a CTA; in a 16-row tile a warp owns all rows and
// a quarter of each step's keys, and is a split itself. At the end a CTA merges its share of the
// rows (attention_merge.h).
#pragma once

#include "attention_stager.h"
#include "attention_warp.h"
#include "overlap.h"

namespace dflash::attention {

// What a thread's two rows see, and what every row of the tile sees (beyond it scores are masked).
__device__ __forceinline__ void find_visible(const PagedAttentionParams& p, const Plan& plan,
                                             const Work& w, int tile_m, int warp_row,
                                             RowState (&rows)[2], KeyRange& seen_by_all) {
  const auto visible = [&](int packed) {
    return visible_keys(p.mask, w.request.seq_len, w.request.query_len,
                        plan.ratio.quotient(min(packed, w.num_rows - 1)));
  };
  const int packed = w.first_row + warp_row + threadIdx.x % 32 / 4;
  rows[0].keys = visible(packed);
  rows[1].keys = visible(packed + 8);
  seen_by_all = {visible(w.first_row + tile_m - 1).begin, visible(w.first_row).end};
}

// Byte offset of a packed row of the query, negative past the last.
__device__ __forceinline__ int64_t query_row(const PagedAttentionParams& p, const Plan& plan,
                                             const Work& w, int packed) {
  if (packed >= w.num_rows) return INT64_MIN;
  const int row = plan.ratio.quotient(packed);
  const int64_t head = w.kv_head * static_cast<int64_t>(plan.ratio.divisor) + packed -
                       row * static_cast<int>(plan.ratio.divisor);
  return ((w.request.begin + row) * p.query_strides.row + head * p.query_strides.head) * 2;
}

template <int D, typename L>
__device__ __forceinline__ void stage_query(const PagedAttentionParams& p, const Plan& plan,
                                            const Work& w, uint8_t* smem) {
  const uint8_t* query = static_cast<const uint8_t*>(p.query);
  for (int i = threadIdx.x; i < L::kM * (D / 8); i += kThreads) {
    const int m = i / (D / 8), column = i % (D / 8) * 16;
    const int64_t offset = query_row(p, plan, w, w.first_row + m);
    uint8_t* to = smem + m * L::kPitch * 2 + column;
    if (plan.query_aligned) {
      cp_async_16(smem_address(to), query + column, offset);
      continue;
    }
#pragma unroll 1
    for (int j = 0; j < 16; ++j) to[j] = offset < 0 ? 0 : query[offset + column + j];
  }
}

// A warp's 16 rows as A fragments, straight from memory. Rows past the last repeat it and are never
// stored: no lane goes its own way.
template <int D>
__device__ __forceinline__ void load_query(const PagedAttentionParams& p, const Plan& plan,
                                           const Work& w, int warp_row, QueryFragments<D>& q) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int packed = min(w.first_row + warp_row + lane / 4 + 8 * half, w.num_rows - 1);
    const uint8_t* row =
        static_cast<const uint8_t*>(p.query) + query_row(p, plan, w, packed) + lane % 4 * 4;
    if (plan.query_aligned) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i)
        q[i / 2][i % 2 * 2 + half] = *reinterpret_cast<const uint32_t*>(row + i * 16);
      continue;
    }
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const uint16_t* two = reinterpret_cast<const uint16_t*>(row + i * 16);
      q[i / 2][i % 2 * 2 + half] = two[0] | static_cast<uint32_t>(two[1]) << 16;
    }
  }
}

// A warp's part of one step.
template <typename T, int D, typename L>
__device__ __forceinline__ void attend(float (&acc)[D / 8][4], RowState (&rows)[2],
                                       const QueryFragments<D>& q, uint32_t query, uint32_t keys,
                                       float scale, int first_key, bool masked) {
  float s[L::kWarpKeys / 8][4];
  if constexpr (L::kWgmma) {
    group_query_key<T, D>(s, q, keys);
  } else {
    multiply_query_key<T, D, L::kPitch>(s, q, query, keys);
  }
#pragma unroll
  for (int n = 0; n < L::kWarpKeys / 8; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) s[n][j] *= scale;
  }
  if (masked) mask_scores(s, rows, first_key);
  softmax(s, acc, rows);
  if constexpr (L::kWgmma) {
    group_probability_value<T, D>(acc, s, keys + L::kMatrixBytes);
  } else {
    multiply_probability_value<T, D, L::kPitch>(acc, s, keys + L::kMatrixBytes);
  }
}

// NOTE: kWgmma is launched on sm_90 alone; elsewhere its body is the portable one.
template <typename T, int D, int kWarpsM, bool kFp8, bool kWgmma>
__global__ void __launch_bounds__(kThreads, ctas_per_sm(kWgmma))
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                           const __grid_constant__ Plan plan) {
  using L = Tile<D, kWarpsM, kWgmma && kDeviceHasWgmma>;
  extern __shared__ __align__(1024) uint8_t smem[];
  wait_for_predecessor();
  let_successor_start();
  const int rank = plan.ctas.remainder(blockIdx.x);
  Stager<T, D, L, kFp8> stager(p, plan, smem);
  // Without a window the first steps are known before the lengths: one latency for both.
  const bool starts_at_0 = p.mask.window_left < 0;
  int32_t block[L::kSlotsPerThread];
#pragma unroll
  for (int j = 0; j < L::kSlotsPerThread; ++j) {
    if (starts_at_0)
      block[j] = stager.find_block(stager.key_of(rank, 0, threadIdx.x + j * kThreads));
  }
  const Work w = find_work<L>(p, plan, rank);
  if (w.first_row >= w.num_rows) return;

  const uint32_t results = smem_address(smem + L::kBarrierAt);
  if (threadIdx.x == 0 && plan.num_splits > 1) expect_results<L, D>(plan, rank, results);
  stager.set_work(w);
#pragma unroll
  for (int j = 0; j < L::kSlotsPerThread; ++j) {
    const int i = threadIdx.x + j * kThreads, key = stager.key_of(w.deal.first, 0, i);
    if (!starts_at_0) block[j] = stager.find_block(key);
    if (i < L::kNumSlots) stager.slots[i] = stager.find_slot(block[j], key);
  }
  __syncwarp();
  __syncthreads();
  if constexpr (L::kStagesQuery) stage_query<D, L>(p, plan, w, smem);
#pragma unroll 1
  for (int step = 0; step < L::kStages; ++step) {
    stager.start(step);
    cp_async_commit();
  }

  const int warp = threadIdx.x / 32;
  const int warp_row = kWarpsM > 1 ? warp * 16 : 0, warp_n = kWarpsM > 1 ? 0 : warp;
  const int warp_key = warp_n * L::kWarpKeys;
  QueryFragments<D> q;
  if constexpr (!L::kStagesQuery) load_query<D>(p, plan, w, warp_row, q);
  RowState rows[2];
  KeyRange seen_by_all;
  find_visible(p, plan, w, L::kM, warp_row, rows, seen_by_all);
  const bool has_rows = w.first_row + warp_row < w.num_rows;
  const float scale = p.scale * (p.k_scale != nullptr ? p.k_scale[0] : 1.0f) * kLog2E;
  const uint32_t query = smem_address(smem + warp_row * L::kPitch * 2);
  float acc[D / 8][4];
#pragma unroll
  for (int d = 0; d < D / 8; ++d) acc[d][0] = acc[d][1] = acc[d][2] = acc[d][3] = 0.0f;
  stager.template wait<L::kStages - 1>();

#pragma unroll 1
  for (int step = 0; step < w.deal.count; ++step) {
    if (step > 0) {
      stager.template wait<L::kStages - 2>();
      stager.start(step - 1 + L::kStages);  // into the stage that all warps have left
      cp_async_commit();
    }
    const uint32_t keys = stager.finish(step) + warp_key * L::kPitch * 2;
    // The next turn's copies need slots: the block table's latency hides behind the matrices. Warps
    // take turns where one of them suffices.
    const int i = (threadIdx.x + (kThreads - step % kWarps * 32)) % kThreads;
    const int ahead = stager.key_of(w.deal.first, step + L::kStages, i);
    const bool looks_ahead = step + L::kStages < w.deal.count && i < L::kStepKeys;
    const int32_t block_ahead = looks_ahead ? stager.find_block(ahead) : -1;

    // A warpgroup multiplies as one.
    if (has_rows || L::kWgmma) {
      const int first_key = (w.deal.first + step * plan.num_ctas()) * L::kStepKeys + warp_key;
      const bool masked =
          first_key < seen_by_all.begin || first_key + L::kWarpKeys > seen_by_all.end;
      attend<T, D, L>(acc, rows, q, query, keys, scale, first_key, masked);
    }
    if (looks_ahead)
      stager.slots[step % L::kStages * L::kStepKeys + i] = stager.find_slot(block_ahead, ahead);
  }

  cp_async_wait<0>();
  __syncwarp();
  __syncthreads();
  if (plan.num_splits == 1) return store_results<T, D, L>(p, plan, w, smem, warp_row, rows, acc);
  // NOTE: until all CTAs are past their stages. Their copies have landed and what they read is in
  // registers: no write has to be published, and a release would wait for all of the GPU.
  cluster_arrive_relaxed();
  cluster_wait_acquire();
  send_results<L, D>(plan, smem, rank * L::kWarpsN + warp_n, warp_row, rows, acc);
  mbarrier_wait_cluster(results, 0);
  merge_rows<T, D, L>(p, plan, w, smem, rank);
}

}  // namespace dflash::attention
