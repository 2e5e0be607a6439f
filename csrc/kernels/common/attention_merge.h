// SPDX-License-Identifier: Apache-2.0
// A tile of rows shared by the CTAs of a cluster: its place in shared memory, a CTA's part of the
// work, and how the splits' results (m, l, acc) are merged. A CTA merges its share of the rows: every
// split sends it their results, which it adds up in split order.
#pragma once

#include "attention_wgmma.h"
#include "divisor.h"
#include "tma.h"

namespace dflash::attention {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

constexpr int kMaxCtas = 16;      // of a cluster
constexpr int kPortableCtas = 8;  // that every device has room for

constexpr int ctas_per_sm(bool wgmma) { return wgmma ? 3 : 2; }

// What the host decides for a launch.
struct Plan {
  Divisor ctas;  // of a cluster: more than one where there are splits
  int num_splits;
  int share;      // rows of a tile that a CTA merges, the last fewer
  Divisor ratio;  // heads of a K/V group
  Divisor page;
  bool query_aligned, cache_aligned, output_aligned;

  DFLASH_HOST_DEVICE int num_ctas() const { return static_cast<int>(ctas.divisor); }
};

template <int D, int kWarpsM, bool kWithWgmma>
struct Tile {
  static constexpr bool kWgmma = kWithWgmma;
  static constexpr int kM = 16 * kWarpsM;
  static constexpr int kWarpsN = kWarps / kWarpsM;  // splits of a CTA
  static constexpr int kWarpKeys = kWarpsM > 1 && D <= 128 ? 64 : (D > 128 ? 16 : 32);
  static constexpr int kStepKeys = kWarpKeys * kWarpsN;
  static constexpr int kStages = kWarpsM > 1 && D > 128 ? 4 : 2;
  // 16 bytes of padding: ldmatrix without bank conflicts.
  static constexpr int kPitch = D + 8;
  static constexpr int kMatrixBytes = kStepKeys * (kWgmma ? D : kPitch) * 2;
  static constexpr int kStageBytes = 2 * kMatrixBytes;  // K, V
  static constexpr bool kStagesQuery = D > 128;  // else the query goes from memory to registers
  static constexpr int kStagesAt = kStagesQuery ? (kM * kPitch * 2 + 1023) / 1024 * 1024 : 0;
  static constexpr int kSlotsAt = kStagesAt + kStages * kStageBytes;
  static constexpr int kNumSlots = kStages * kStepKeys;
  static constexpr int kSlotsPerThread = (kNumSlots + kThreads - 1) / kThreads;
  static constexpr int kBarrierAt = kSlotsAt + kNumSlots * static_cast<int>(sizeof(SlotOffset));
  static constexpr int kSmemBytes = kBarrierAt + 16;
  // The results lie over the stages and the slots.
  static constexpr int kAccPitch = D + 8;  // floats; stores without bank conflicts
  static constexpr int kNumStates = (kM + (kWgmma ? kMaxCtas - 1 : 0)) * kWarpsN;
  static constexpr int kStateAt = kSlotsAt;
  static_assert(kStagesAt + kNumStates * kAccPitch * 4 <= kSlotsAt);
  static_assert(kStateAt + kNumStates * 8 <= kBarrierAt && kM * kPitch * 2 <= kSlotsAt);
  // fp8 rows arrive behind the first stage, as raw bytes, and are converted into it.
  static_assert(kStages * 2 * kStepKeys * D <= (kStages - 1) * kStageBytes);
  static_assert(!kWgmma || kStepKeys == kWgmmaKeys);

  // Where a byte of a step's K or V matrix lies in its stage.
  __device__ __forceinline__ static uint32_t place(int row, int column) {
    return kWgmma ? swizzled(row, column) : row * kPitch * 2 + column;
  }
};

// One CTA's view of its work, uniform over the CTA; all but deal is uniform over the cluster.
struct Work {
  Request request;
  int kv_head;
  int first_row;  // packed
  int num_rows;   // packed, of the request
  KeyRange keys;  // of the tile
  Deal deal;      // steps of this CTA
};

template <typename L>
__device__ __forceinline__ Work find_work(const PagedAttentionParams& p, const Plan& plan,
                                          int rank) {
  Work w;
  w.request = load_request(p, blockIdx.z);
  w.kv_head = blockIdx.y;
  // Late tiles first: with a causal mask they see the most keys.
  w.first_row = plan.ctas.quotient(gridDim.x - 1 - blockIdx.x) * L::kM;
  w.num_rows = w.request.query_len * static_cast<int>(plan.ratio.divisor);
  const int last_row = min(w.first_row + L::kM, w.num_rows) - 1;
  w.keys = tile_keys(p.mask, w.request.seq_len, w.request.query_len,
                     plan.ratio.quotient(w.first_row), plan.ratio.quotient(max(last_row, 0)));
  w.deal = deal_steps(w.keys, L::kStepKeys, plan.num_ctas(), rank);
  return w;
}

// Results as a CTA receives them: its share of the tile's rows, split by split.
template <typename L>
__device__ __forceinline__ float* accumulators(uint8_t* smem, int i) {
  return reinterpret_cast<float*>(smem + L::kStagesAt) + i * L::kAccPitch;
}

template <typename L>
__device__ __forceinline__ float2* state_of(uint8_t* smem, int i) {
  return reinterpret_cast<float2*>(smem + L::kStateAt) + i;
}

// Rows of the tile that CTA `rank` merges.
template <typename L>
__device__ __forceinline__ int share_of(const Plan& plan, int rank) {
  return min(plan.share, L::kM - rank * plan.share);
}

// Before the cluster meets: the barrier that counts the results of all splits.
template <typename L, int D>
__device__ __forceinline__ void expect_results(const Plan& plan, int rank, uint32_t barrier) {
  mbarrier_init(barrier, 1);
  mbarrier_init_fence();
  mbarrier_arrive_expect(barrier, share_of<L>(plan, rank) * plan.num_splits * (4 * D + 8));
}

// A warp's softmax state and accumulators, each row to the CTA that merges it.
template <typename L, int D>
__device__ __forceinline__ void send_results(const Plan& plan, uint8_t* smem, int split,
                                             int warp_row, const RowState (&rows)[2],
                                             const float (&acc)[D / 8][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = warp_row + lane / 4 + 8 * half, rank = m / plan.share;
    const int i = split * share_of<L>(plan, rank) + m - rank * plan.share;
    float l = rows[half].l;
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    const uint32_t barrier = cluster_address(smem_address(smem + L::kBarrierAt), rank);
    if (lane % 4 == 0) {
      const uint32_t state = smem_address(state_of<L>(smem, i));
      store_async(cluster_address(state, rank), barrier, rows[half].m, l);
    }
    const uint32_t to =
        cluster_address(smem_address(accumulators<L>(smem, i) + lane % 4 * 2), rank);
#pragma unroll
    for (int d = 0; d < D / 8; ++d)
      store_async(to + d * 32, barrier, acc[d][2 * half], acc[d][2 * half + 1]);
  }
}

template <typename T>
__device__ __forceinline__ T* output_row(const PagedAttentionParams& p, const Plan& plan,
                                         const Work& w, int packed) {
  const int row = plan.ratio.quotient(packed);
  const int64_t head = w.kv_head * static_cast<int64_t>(plan.ratio.divisor) + packed -
                       row * static_cast<int>(plan.ratio.divisor);
  return static_cast<T*>(p.output) + (w.request.begin + row) * p.output_strides.row +
         head * p.output_strides.head;
}

__device__ __forceinline__ float factor_of(const PagedAttentionParams& p, const Plan& plan,
                                           const Work& w, int packed, float m, float l) {
  const int head = w.kv_head * static_cast<int>(plan.ratio.divisor) + plan.ratio.remainder(packed);
  return output_factor(p, head, m, l);
}

// One split: a warp's 16 rows through its part of shared memory, so that whole rows are written.
template <typename T, int D, typename L>
__device__ __forceinline__ void store_results(const PagedAttentionParams& p, const Plan& plan,
                                              const Work& w, uint8_t* smem, int warp_row,
                                              const RowState (&rows)[2],
                                              const float (&acc)[D / 8][4]) {
  const int lane = threadIdx.x % 32;
  uint8_t* staged = smem + warp_row * L::kPitch * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float l = rows[half].l;
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    const int m = lane / 4 + 8 * half;
    const float factor = factor_of(p, plan, w, w.first_row + warp_row + m, rows[half].m, l);
    uint32_t* to = reinterpret_cast<uint32_t*>(staged + m * L::kPitch * 2) + lane % 4;
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      const float* pair = acc[d] + 2 * half;
      to[d * 4] = factor == 0.0f ? 0 : pack2<T>(pair[0] * factor, pair[1] * factor);
    }
  }
  __syncwarp();
  for (int i = lane; i < 16 * (D / 8); i += 32) {
    const int m = i / (D / 8), column = i % (D / 8) * 8;
    const int packed = w.first_row + warp_row + m;
    if (packed >= w.num_rows) break;
    const Vec<T, 8> row =
        load_vec<8>(reinterpret_cast<const T*>(staged + m * L::kPitch * 2) + column);
    T* out = output_row<T>(p, plan, w, packed) + column;
    if (plan.output_aligned) {
      store_vec<8>(out, row);
      continue;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) out[j] = row.x[j];
  }
}

template <typename T>
__device__ __forceinline__ void store_columns(T* out, const float (&sum)[4], float factor,
                                              bool aligned) {
  Vec<T, 4> rounded;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    rounded.x[j] = from_float<T>(factor == 0.0f ? 0.0f : sum[j] * factor);
  if (aligned) return store_vec<4>(out, rounded);
#pragma unroll
  for (int j = 0; j < 4; ++j) out[j] = rounded.x[j];
}

// The CTA's share of the tile's rows, four columns a lane: merged and written.
template <typename T, int D, typename L>
__device__ __forceinline__ void merge_rows(const PagedAttentionParams& p, const Plan& plan,
                                           const Work& w, uint8_t* smem, int rank) {
  constexpr int kUnroll = 4;  // splits
  const int share = share_of<L>(plan, rank);
  for (int i = threadIdx.x; i < (D / 4) * share; i += kThreads) {
    const int r = i / (D / 4), column = i % (D / 4) * 4;
    const int packed = w.first_row + rank * plan.share + r;
    if (packed >= w.num_rows) break;
    float top = kNothing;
#pragma unroll kUnroll
    for (int split = 0; split < plan.num_splits; ++split)
      top = fmaxf(top, state_of<L>(smem, split * share + r)->x);
    float l = 0.0f, sum[4] = {};
#pragma unroll kUnroll
    for (int split = 0; split < plan.num_splits; ++split) {
      const int from = split * share + r;
      const float2 state = *state_of<L>(smem, from);
      const Vec<float, 4> part = load_vec<4>(accumulators<L>(smem, from) + column);
      const float weight = weight_of(state.x, top);
      l += weight * state.y;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[j] += weight * part.x[j];
    }
    store_columns(output_row<T>(p, plan, w, packed) + column, sum,
                  factor_of(p, plan, w, packed, top, l), plan.output_aligned);
  }
}

}  // namespace dflash::attention
