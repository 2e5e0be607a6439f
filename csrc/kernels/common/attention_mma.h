// SPDX-License-Identifier: Apache-2.0
// One split of the keys of one tile of packed rows (query rows x heads of one K/V group) a CTA, on
// mma.sync. K/V tiles stream through two stages of shared memory. In a 64-row tile a warp owns 16
// rows and all keys; in a 16-row tile it owns all rows and 16 of 64 keys, and the warps' results
// are merged at the end.
#pragma once

#include "attention_tile.h"

namespace dflash::attention {

template <typename T, int D, int kWarpsM>
struct Tile {
  static constexpr int kM = 16 * kWarpsM;
  static constexpr int kWarpsN = 4 / kWarpsM;
  static constexpr int kWarpKeys = kBlockN / kWarpsN;
  static constexpr int kPitch = D + 8;  // 16 bytes of padding: ldmatrix without bank conflicts
  static constexpr int kTileBytes = kBlockN * kPitch * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // K, V
  static constexpr int kStagesAt = kM * kPitch * 2;
  static constexpr int kSlotsAt = kStagesAt + 2 * kStageBytes;
  static constexpr int kSmemBytes = kSlotsAt + 2 * kBlockN * static_cast<int>(sizeof(SlotOffset));
  // The epilogue's accumulators lie over the stages.
  static constexpr int kAccPitch = D + 4;
  static constexpr int kStateAt = kStagesAt + kWarpsN * kM * kAccPitch * 4;
  static_assert(kStateAt + kWarpsN * kM * 8 <= kSlotsAt);
  // fp8 rows arrive in the second stage's place, two stages of raw bytes, and are converted into
  // the first.
  static_assert(4 * kBlockN * D <= kStageBytes);
};

// kBlockN rows of D elements of kElementBytes each, one matrix.
template <int D, int kElementBytes, int kPitchBytes>
__device__ __forceinline__ void stage_rows(uint8_t* dst, const void* rows, const SlotOffset* slots,
                                           int64_t SlotOffset::* which, bool aligned) {
  constexpr int kChunks = D * kElementBytes / 16;
#pragma unroll 4
  for (int i = threadIdx.x; i < kBlockN * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 16;
    stage_16(dst + row * kPitchBytes + column, rows, slots[row].*which, column, aligned);
  }
}

template <typename T, int D, int kPitch>
__device__ __forceinline__ void convert_fp8_rows(uint8_t* dst, const uint8_t* raw) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kBlockN * D / 8; i += kThreads) {
    const int row = i / (D / 8), column = i % (D / 8) * 8;
    const Vec<uint16_t, 4> in =
        load_vec<4>(reinterpret_cast<const uint16_t*>(raw + row * D + column));
    Vec<uint32_t, 4> out;
#pragma unroll
    for (int j = 0; j < 4; ++j) out.x[j] = convert_e4m3x2<T>(in.x[j]);
    store_vec<4>(reinterpret_cast<uint32_t*>(dst + (row * kPitch + column) * 2), out);
  }
}

// One CTA's view of its work; everything is uniform over the CTA.
struct Work {
  Request request;
  int kv_head;
  int first_row;   // packed
  int num_rows;    // packed, of the request
  KeyRange keys;   // of this split
  int num_splits;  // active, of the tile
};

template <int kM>
__device__ __forceinline__ Work find_work(const PagedAttentionParams& p, int max_splits) {
  Work w;
  const int ratio = p.num_heads / p.num_kv_heads;
  w.request = load_request(p, blockIdx.z);
  w.kv_head = blockIdx.x % p.num_kv_heads;
  // Late tiles first: with a causal mask they see the most keys.
  w.first_row = static_cast<int>(gridDim.x / p.num_kv_heads - 1 - blockIdx.x / p.num_kv_heads) * kM;
  w.num_rows = w.request.query_len * ratio;
  const int last_row = min(w.first_row + kM, w.num_rows) - 1;
  const KeyRange tile = tile_keys(p.mask, w.request.seq_len, w.request.query_len,
                                  w.first_row / ratio, max(last_row, 0) / ratio);
  const KeySplits splits = split_keys(tile, max_splits, kBlockN);
  w.num_splits = splits.num_splits;
  w.keys.begin = tile.begin + static_cast<int>(blockIdx.y) * splits.keys_per_split;
  w.keys.end = min(w.keys.begin + splits.keys_per_split, tile.end);
  return w;
}

// Rows of a fragment's thread: packed rows first_row + 16 * warp + lane / 4 and 8 further.
struct RowState {
  KeyRange keys;
  float m = kNothing;
  float l = 0.0f;  // this thread's columns only, until the end
};

// What a thread's two rows see, and what every row of the tile sees (beyond it scores are masked).
__device__ __forceinline__ void find_visible(const PagedAttentionParams& p, const Work& w,
                                             int tile_m, int warp_row, RowState (&rows)[2],
                                             KeyRange& seen_by_all) {
  const int ratio = p.num_heads / p.num_kv_heads;
  const auto visible = [&](int packed) {
    KeyRange keys = visible_keys(p.mask, w.request.seq_len, w.request.query_len,
                                 min(packed, w.num_rows - 1) / ratio);
    keys.end = min(keys.end, w.keys.end);
    return keys;
  };
  const int packed = w.first_row + warp_row + threadIdx.x % 32 / 4;
  rows[0].keys = visible(packed);
  rows[1].keys = visible(packed + 8);
  seen_by_all = {visible(w.first_row + tile_m - 1).begin, visible(w.first_row).end};
}

template <typename T, int D, int kWarpsM>
__device__ __forceinline__ void load_query(const PagedAttentionParams& p, const Work& w,
                                           uint8_t* smem, bool aligned) {
  using L = Tile<T, D, kWarpsM>;
  const int ratio = p.num_heads / p.num_kv_heads;
  for (int i = threadIdx.x; i < L::kM * (D / 8); i += kThreads) {
    const int m = i / (D / 8), column = i % (D / 8) * 16;
    const int packed = w.first_row + m;
    const int64_t row = w.request.begin + packed / ratio;
    const int64_t head = w.kv_head * ratio + packed % ratio;
    const int64_t offset = (row * p.query_strides.row + head * p.query_strides.head) * 2;
    stage_16(smem + m * L::kPitch * 2 + column, p.query, packed < w.num_rows ? offset : -1, column,
             aligned);
  }
}

// Scores to probabilities in place; rescales acc. Scores of keys a row does not see become -inf by
// selection: what lies in their slots never counts.
template <int kTilesN, int kTilesD>
__device__ __forceinline__ void softmax(float (&s)[kTilesN][4], float (&acc)[kTilesD][4],
                                        RowState (&rows)[2], float scale, int first_key,
                                        bool masked) {
  const int column = first_key + (threadIdx.x & 3) * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    RowState& row = rows[half];
    float m = row.m;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[n][2 * half + j];
        const int key = column + n * 8 + j;
        x = masked && (key < row.keys.begin || key >= row.keys.end) ? kNothing : x * scale;
        m = fmaxf(m, x);
      }
    }
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const float base = m == kNothing ? 0.0f : m;
    const float alpha = exp2f(row.m - base);
    float l = 0.0f;
#pragma unroll
    for (int n = 0; n < kTilesN; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[n][2 * half + j];
        x = exp2f(x - base);
        l += x;
      }
    }
    row.l = row.l * alpha + l;
    row.m = m;
#pragma unroll
    for (int d = 0; d < kTilesD; ++d) {
      acc[d][2 * half] *= alpha;
      acc[d][2 * half + 1] *= alpha;
    }
  }
}

// The query stays in registers where it fits.
template <int D, int kPitch>
__device__ __forceinline__ void load_query_fragments(uint32_t (&q)[D > 128 ? 1 : D / 16][4],
                                                     const uint8_t* query) {
  if constexpr (D <= 128) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      ldmatrix_x4(q[k], query + ((lane & 15) * kPitch + k * 16 + (lane >> 4) * 8) * 2);
    }
  }
}

// s = q k^T for a warp's 16 rows and kTilesN * 8 keys.
template <typename T, int D, int kPitch, int kTilesN>
__device__ __forceinline__ void multiply_query_key(float (&s)[kTilesN][4],
                                                   const uint32_t (&q)[D > 128 ? 1 : D / 16][4],
                                                   const uint8_t* query, const uint8_t* keys) {
  const int lane = threadIdx.x & 31;
  const int key = (lane & 7) + ((lane >> 4) << 3), column = (lane >> 3 & 1) * 8;
#pragma unroll
  for (int n = 0; n < kTilesN; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[4];
    if constexpr (D > 128) {
      ldmatrix_x4(a, query + ((lane & 15) * kPitch + k * 16 + (lane >> 4) * 8) * 2);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = q[k][i];
    }
#pragma unroll
    for (int n = 0; n < kTilesN; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, keys + ((n * 8 + key) * kPitch + k * 16 + column) * 2);
      mma_m16n8k16<T>(s[n], a, b[0], b[1]);
      mma_m16n8k16<T>(s[n + 1], a, b[2], b[3]);
    }
  }
}

template <typename T, int D, int kPitch, int kTilesN>
__device__ __forceinline__ void multiply_probability_value(float (&acc)[D / 8][4],
                                                           const float (&s)[kTilesN][4],
                                                           const uint8_t* values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < kTilesN / 2; ++k) {
    const uint32_t a[4] = {pack2<T>(s[2 * k][0], s[2 * k][1]), pack2<T>(s[2 * k][2], s[2 * k][3]),
                           pack2<T>(s[2 * k + 1][0], s[2 * k + 1][1]),
                           pack2<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b,
                        values + ((k * 16 + (lane & 15)) * kPitch + d * 8 + (lane >> 4) * 8) * 2);
      mma_m16n8k16<T>(acc[d], a, b[0], b[1]);
      mma_m16n8k16<T>(acc[d + 1], a, b[2], b[3]);
    }
  }
}

// Four columns of one packed row from the accumulators in shared memory: to the output, or to the
// workspace.
template <typename T, int D, int kWarpsM>
__device__ __forceinline__ void store_columns(const PagedAttentionParams& p, const Work& w,
                                              int max_splits, const uint8_t* smem, int m,
                                              int column, bool aligned) {
  using L = Tile<T, D, kWarpsM>;
  const float* acc =
      reinterpret_cast<const float*>(smem + L::kStagesAt) + m * L::kAccPitch + column;
  const float2* state = reinterpret_cast<const float2*>(smem + L::kStateAt) + m;
  float top = kNothing;
#pragma unroll
  for (int g = 0; g < L::kWarpsN; ++g) top = fmaxf(top, state[g * L::kM].x);
  float l = 0.0f;
  Vec<float, 4> sum{};
#pragma unroll
  for (int g = 0; g < L::kWarpsN; ++g) {
    const float weight = weight_of(state[g * L::kM].x, top);
    const Vec<float, 4> part = load_vec<4>(acc + g * L::kM * L::kAccPitch);
    l += weight * state[g * L::kM].y;
#pragma unroll
    for (int j = 0; j < 4; ++j) sum.x[j] += weight * part.x[j];
  }

  const int ratio = p.num_heads / p.num_kv_heads;
  const int64_t row = w.request.begin + (w.first_row + m) / ratio;
  const int head = w.kv_head * ratio + (w.first_row + m) % ratio;
  if (w.num_splits > 1) {
    const Partials out = partials(p, max_splits);
    const int64_t at = partial_row(p, blockIdx.y, row, head);
    store_vec<4>(out.acc + at * D + column, sum);
    if (column == 0) out.state[at] = make_float2(top, l);
    return;
  }
  const float factor = output_factor(p, head, top, l);
  T* out = static_cast<T*>(p.output) + row * p.output_strides.row + head * p.output_strides.head +
           column;
  Vec<T, 4> rounded;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    rounded.x[j] = from_float<T>(factor == 0.0f ? 0.0f : sum.x[j] * factor);
  if (aligned) return store_vec<4>(out, rounded);
#pragma unroll
  for (int j = 0; j < 4; ++j) out[j] = rounded.x[j];
}

// Brings K/V tiles of a split into shared memory, two stages deep; slots are looked up a tile
// before their copies.
template <typename T, int D, int kWarpsM>
struct Stager {
  using L = Tile<T, D, kWarpsM>;
  const PagedAttentionParams& p;
  const int32_t* blocks;
  const uint8_t* key_head;
  const uint8_t* value_head;
  KeyRange keys;
  bool fp8, aligned;
  uint8_t* stages;
  SlotOffset* slots;

  __device__ __forceinline__ Stager(const PagedAttentionParams& params, const Work& w,
                                    bool cache_aligned, uint8_t* smem)
      : p(params),
        blocks(params.block_table + blockIdx.z * params.block_table_stride),
        keys(w.keys),
        fp8(params.kv_dtype == DType::kFloat8E4M3),
        aligned(cache_aligned),
        stages(smem + L::kStagesAt),
        slots(reinterpret_cast<SlotOffset*>(smem + L::kSlotsAt)) {
    const int64_t size = fp8 ? 1 : 2;
    key_head = static_cast<const uint8_t*>(p.key_cache) + w.kv_head * p.key_strides.head * size;
    value_head =
        static_cast<const uint8_t*>(p.value_cache) + w.kv_head * p.value_strides.head * size;
  }

  // Of this thread's key. Keys outside the split are never looked up: a page that is not visible
  // may hold anything.
  __device__ __forceinline__ SlotOffset find(int tile) const {
    const int key = keys.begin + tile * kBlockN + threadIdx.x;
    return key < keys.end ? find_slot(p, blocks, key) : SlotOffset{-1, -1};
  }

  __device__ __forceinline__ void put_slot(int tile, const SlotOffset& slot) {
    slots[(tile & 1) * kBlockN + threadIdx.x] = slot;
  }

  __device__ __forceinline__ uint8_t* raw_tile(int tile) const {
    return stages + L::kStageBytes + (tile & 1) * 2 * kBlockN * D;
  }

  __device__ __forceinline__ void start(int tile) const {
    const SlotOffset* tile_slots = slots + (tile & 1) * kBlockN;
    if (fp8) {
      stage_rows<D, 1, D>(raw_tile(tile), key_head, tile_slots, &SlotOffset::key, aligned);
      stage_rows<D, 1, D>(raw_tile(tile) + kBlockN * D, value_head, tile_slots, &SlotOffset::value,
                          aligned);
    } else {
      uint8_t* stage = stages + (tile & 1) * L::kStageBytes;
      stage_rows<D, 2, L::kPitch * 2>(stage, key_head, tile_slots, &SlotOffset::key, aligned);
      stage_rows<D, 2, L::kPitch * 2>(stage + L::kTileBytes, value_head, tile_slots,
                                      &SlotOffset::value, aligned);
    }
    cp_async_commit();
  }

  // K of a tile that has arrived, V kTileBytes after it.
  __device__ __forceinline__ const uint8_t* finish(int tile) const {
    if (!fp8) return stages + (tile & 1) * L::kStageBytes;
    convert_fp8_rows<T, D, L::kPitch>(stages, raw_tile(tile));
    convert_fp8_rows<T, D, L::kPitch>(stages + L::kTileBytes, raw_tile(tile) + kBlockN * D);
    __syncthreads();
    return stages;
  }
};

// A warp's accumulators and softmax state into shared memory, over the stages.
template <typename T, int D, int kWarpsM>
__device__ __forceinline__ void put_accumulators(uint8_t* smem, int first_m,
                                                 const RowState (&rows)[2],
                                                 const float (&acc)[D / 8][4]) {
  using L = Tile<T, D, kWarpsM>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = first_m + lane / 4 + 8 * half;
    float l = rows[half].l;
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    if (lane % 4 == 0)
      reinterpret_cast<float2*>(smem + L::kStateAt)[m] = make_float2(rows[half].m, l);
    float* to = reinterpret_cast<float*>(smem + L::kStagesAt) + m * L::kAccPitch + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      *reinterpret_cast<float2*>(to + d * 8) = make_float2(acc[d][2 * half], acc[d][2 * half + 1]);
    }
  }
}

template <typename T, int D, int kWarpsM>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p, const Plan plan) {
  using L = Tile<T, D, kWarpsM>;
  extern __shared__ __align__(16) uint8_t smem[];
  const Work w = find_work<L::kM>(p, plan.num_splits);
  // The first split stays even without keys: it writes the zeros.
  if (w.first_row >= w.num_rows || static_cast<int>(blockIdx.y) >= max(w.num_splits, 1)) return;

  const int warp = threadIdx.x / 32;
  const int warp_row = kWarpsM > 1 ? warp * 16 : 0,
            warp_key = kWarpsM > 1 ? 0 : warp * L::kWarpKeys;
  const int num_tiles = w.num_splits > 0 ? ceil_div(w.keys.end - w.keys.begin, kBlockN) : 0;
  Stager<T, D, kWarpsM> stager(p, w, plan.cache_aligned, smem);
  if (threadIdx.x < kBlockN) {
    stager.put_slot(0, stager.find(0));
    stager.put_slot(1, stager.find(1));
  }
  load_query<T, D, kWarpsM>(p, w, smem, plan.query_aligned);
  __syncthreads();
  if (num_tiles > 0) stager.start(0);

  RowState rows[2];
  KeyRange seen_by_all;
  find_visible(p, w, L::kM, warp_row, rows, seen_by_all);
  const float scale = p.scale * (p.k_scale != nullptr ? p.k_scale[0] : 1.0f) * kLog2E;
  const uint8_t* query = smem + warp_row * L::kPitch * 2;
  uint32_t q[D > 128 ? 1 : D / 16][4];
  float acc[D / 8][4];
#pragma unroll
  for (int d = 0; d < D / 8; ++d) acc[d][0] = acc[d][1] = acc[d][2] = acc[d][3] = 0.0f;

  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait_all();
    __syncthreads();
    if (tile + 1 < num_tiles) stager.start(tile + 1);
    const uint8_t* keys = stager.finish(tile);
    if (tile == 0) load_query_fragments<D, L::kPitch>(q, query);
    // Two tiles ahead: the block table's latency hides behind the matrices.
    const bool looks_ahead = tile + 2 < num_tiles && threadIdx.x < kBlockN;
    const SlotOffset ahead = looks_ahead ? stager.find(tile + 2) : SlotOffset{-1, -1};

    float s[L::kWarpKeys / 8][4];
    const int first_key = w.keys.begin + tile * kBlockN;
    const bool masked = first_key < seen_by_all.begin || first_key + kBlockN > seen_by_all.end;
    multiply_query_key<T, D, L::kPitch>(s, q, query, keys + warp_key * L::kPitch * 2);
    softmax(s, acc, rows, scale, first_key + warp_key, masked);
    multiply_probability_value<T, D, L::kPitch>(acc, s,
                                                keys + L::kTileBytes + warp_key * L::kPitch * 2);
    if (looks_ahead) stager.put_slot(tile + 2, ahead);
  }

  // Without tiles the query's copies may still be in flight.
  cp_async_wait_all();
  __syncthreads();
  put_accumulators<T, D, kWarpsM>(smem, kWarpsM > 1 ? warp_row : warp * L::kM, rows, acc);
  __syncthreads();
  for (int i = threadIdx.x; i < L::kM * (D / 4); i += kThreads) {
    const int m = i / (D / 4);
    if (w.first_row + m >= w.num_rows) break;
    store_columns<T, D, kWarpsM>(p, w, plan.num_splits, smem, m, i % (D / 4) * 4,
                                 plan.output_aligned);
  }
}

}  // namespace dflash::attention
