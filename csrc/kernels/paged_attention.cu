// SPDX-License-Identifier: Apache-2.0
// Attention of ragged query rows over a paged cache, split over keys. A CTA owns one split of the keys of one tile of
// packed rows (query rows x heads of one K/V group) and streams K/V tiles through two stages of shared memory. In a
// 64-row tile a warp owns 16 rows and all keys; in a 16-row tile it owns all rows and every fourth 16 keys. Lengths are
// read on the device: a CTA without work leaves. A tile with one active split writes the output, else partial results
// that combine_kernel merges in split order.
// Bytes moved: visible K and V once a tile, query and output once, partials (D + 2) floats a row, head and split.
#include "paged_attention.h"

#include "common/attention_tile.h"
#include "common/device.h"

namespace dflash {
namespace {

using namespace attention;

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
  // fp8 rows arrive in the second stage's place, two stages of raw bytes, and are converted into the first.
  static_assert(4 * kBlockN * D <= kStageBytes);
};

// kBlockN rows of D elements of kElementBytes each, one matrix.
template <int D, int kElementBytes, int kPitchBytes>
__device__ __forceinline__ void stage_rows(uint8_t* dst, const void* rows, const SlotOffset* slots,
                                           int64_t SlotOffset::*which, bool aligned) {
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
    const Vec<uint16_t, 4> in = load_vec<4>(reinterpret_cast<const uint16_t*>(raw + row * D + column));
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
  const KeyRange tile =
      tile_keys(p.mask, w.request.seq_len, w.request.query_len, w.first_row / ratio, max(last_row, 0) / ratio);
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

template <typename T, int D, int kWarpsM>
__device__ __forceinline__ void load_query(const PagedAttentionParams& p, const Work& w, uint8_t* smem, bool aligned) {
  using L = Tile<T, D, kWarpsM>;
  const int ratio = p.num_heads / p.num_kv_heads;
  for (int i = threadIdx.x; i < L::kM * (D / 8); i += kThreads) {
    const int m = i / (D / 8), column = i % (D / 8) * 16;
    const int packed = w.first_row + m;
    const int64_t row = w.request.begin + packed / ratio;
    const int64_t head = w.kv_head * ratio + packed % ratio;
    const int64_t offset = (row * p.query_strides.row + head * p.query_strides.head) * 2;
    stage_16(smem + m * L::kPitch * 2 + column, p.query, packed < w.num_rows ? offset : -1, column, aligned);
  }
}

// Scores to probabilities in place; rescales acc. Scores of keys a row does not see become -inf by selection: what
// lies in their slots never counts.
template <int kTilesN, int kTilesD>
__device__ __forceinline__ void softmax(float (&s)[kTilesN][4], float (&acc)[kTilesD][4], RowState (&rows)[2],
                                        float scale, int first_key, bool masked) {
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

// s = q k^T for a warp's 16 rows and kTilesN * 8 keys. Query fragments stay in registers where they fit.
template <typename T, int D, int kPitch, int kTilesN>
__device__ __forceinline__ void multiply_query_key(float (&s)[kTilesN][4], const uint32_t (&q)[D > 128 ? 1 : D / 16][4],
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
__device__ __forceinline__ void multiply_probability_value(float (&acc)[D / 8][4], const float (&s)[kTilesN][4],
                                                           const uint8_t* values) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int k = 0; k < kTilesN / 2; ++k) {
    const uint32_t a[4] = {pack2<T>(s[2 * k][0], s[2 * k][1]), pack2<T>(s[2 * k][2], s[2 * k][3]),
                           pack2<T>(s[2 * k + 1][0], s[2 * k + 1][1]), pack2<T>(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, values + ((k * 16 + (lane & 15)) * kPitch + d * 8 + (lane >> 4) * 8) * 2);
      mma_m16n8k16<T>(acc[d], a, b[0], b[1]);
      mma_m16n8k16<T>(acc[d + 1], a, b[2], b[3]);
    }
  }
}

// Four columns of one packed row from the accumulators in shared memory: to the output, or to the workspace.
template <typename T, int D, int kWarpsM>
__device__ __forceinline__ void store_columns(const PagedAttentionParams& p, const Work& w, int max_splits,
                                              const uint8_t* smem, int m, int column, bool aligned) {
  using L = Tile<T, D, kWarpsM>;
  const float* acc = reinterpret_cast<const float*>(smem + L::kStagesAt) + m * L::kAccPitch + column;
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
  T* out = static_cast<T*>(p.output) + row * p.output_strides.row + head * p.output_strides.head + column;
  Vec<T, 4> rounded;
#pragma unroll
  for (int j = 0; j < 4; ++j) rounded.x[j] = from_float<T>(factor == 0.0f ? 0.0f : sum.x[j] * factor);
  if (aligned) return store_vec<4>(out, rounded);
#pragma unroll
  for (int j = 0; j < 4; ++j) out[j] = rounded.x[j];
}

struct Plan {
  int num_splits;
  bool query_aligned, cache_aligned, output_aligned;
};

template <typename T, int D, int kWarpsM>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p, const Plan plan) {
  using L = Tile<T, D, kWarpsM>;
  extern __shared__ __align__(16) uint8_t smem[];
  const Work w = find_work<L::kM>(p, plan.num_splits);
  // The first split stays even without keys: it writes the zeros.
  if (w.first_row >= w.num_rows || static_cast<int>(blockIdx.y) >= max(w.num_splits, 1)) return;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = kWarpsM > 1 ? warp * 16 : 0, warp_key = kWarpsM > 1 ? 0 : warp * L::kWarpKeys;
  const int ratio = p.num_heads / p.num_kv_heads;
  const bool fp8 = p.kv_dtype == DType::kFloat8E4M3;
  const int num_tiles = w.keys.end > w.keys.begin ? ceil_div(w.keys.end - w.keys.begin, kBlockN) : 0;
  const int32_t* blocks = p.block_table + blockIdx.z * p.block_table_stride;
  const uint8_t* key_head = static_cast<const uint8_t*>(p.key_cache) + w.kv_head * p.key_strides.head * (fp8 ? 1 : 2);
  const uint8_t* value_head =
      static_cast<const uint8_t*>(p.value_cache) + w.kv_head * p.value_strides.head * (fp8 ? 1 : 2);
  SlotOffset* slots = reinterpret_cast<SlotOffset*>(smem + L::kSlotsAt);
  uint8_t* stages = smem + L::kStagesAt;

  // Keys outside this split are never looked up: a page that is not visible may hold anything.
  const auto slot_of = [&](int tile) -> SlotOffset {
    const int key = w.keys.begin + tile * kBlockN + threadIdx.x;
    return key < w.keys.end ? find_slot(p, blocks, key) : SlotOffset{-1, -1};
  };
  const auto stage_tile = [&](int tile) {
    const SlotOffset* tile_slots = slots + (tile & 1) * kBlockN;
    if (fp8) {
      uint8_t* raw = stages + L::kStageBytes + (tile & 1) * 2 * kBlockN * D;
      stage_rows<D, 1, D>(raw, key_head, tile_slots, &SlotOffset::key, plan.cache_aligned);
      stage_rows<D, 1, D>(raw + kBlockN * D, value_head, tile_slots, &SlotOffset::value, plan.cache_aligned);
    } else {
      uint8_t* stage = stages + (tile & 1) * L::kStageBytes;
      stage_rows<D, 2, L::kPitch * 2>(stage, key_head, tile_slots, &SlotOffset::key, plan.cache_aligned);
      stage_rows<D, 2, L::kPitch * 2>(stage + L::kTileBytes, value_head, tile_slots, &SlotOffset::value,
                                      plan.cache_aligned);
    }
    cp_async_commit();
  };

  if (threadIdx.x < kBlockN) {
    slots[threadIdx.x] = slot_of(0);
    slots[kBlockN + threadIdx.x] = slot_of(1);
  }
  load_query<T, D, kWarpsM>(p, w, smem, plan.query_aligned);
  __syncthreads();
  if (num_tiles > 0) stage_tile(0);

  RowState rows[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int packed = min(w.first_row + warp_row + lane / 4 + 8 * half, w.num_rows - 1);
    rows[half].keys = visible_keys(p.mask, w.request.seq_len, w.request.query_len, packed / ratio);
    rows[half].keys.end = min(rows[half].keys.end, w.keys.end);
  }
  const int last_row = min(w.first_row + L::kM, w.num_rows) - 1;
  const int seen_from =
      visible_keys(p.mask, w.request.seq_len, w.request.query_len, last_row / ratio).begin;  // by every row
  const int seen_to = min(
      visible_keys(p.mask, w.request.seq_len, w.request.query_len, w.first_row / ratio).end, w.keys.end);
  const float scale = p.scale * (p.k_scale != nullptr ? p.k_scale[0] : 1.0f) * kLog2E;

  const uint8_t* warp_query = smem + warp_row * L::kPitch * 2;
  uint32_t q[D > 128 ? 1 : D / 16][4];
  float acc[D / 8][4];
#pragma unroll
  for (int d = 0; d < D / 8; ++d) acc[d][0] = acc[d][1] = acc[d][2] = acc[d][3] = 0.0f;

  for (int tile = 0; tile < num_tiles; ++tile) {
    cp_async_wait_all();
    __syncthreads();
    if (tile + 1 < num_tiles) stage_tile(tile + 1);
    uint8_t* keys = stages + (fp8 ? 0 : (tile & 1) * L::kStageBytes);
    if (fp8) {
      const uint8_t* raw = stages + L::kStageBytes + (tile & 1) * 2 * kBlockN * D;
      convert_fp8_rows<T, D, L::kPitch>(keys, raw);
      convert_fp8_rows<T, D, L::kPitch>(keys + L::kTileBytes, raw + kBlockN * D);
      __syncthreads();
    }
    if constexpr (D <= 128) {
      if (tile == 0) {
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
          ldmatrix_x4(q[k], warp_query + ((lane & 15) * L::kPitch + k * 16 + (lane >> 4) * 8) * 2);
        }
      }
    }
    // Looked up two tiles ahead: the table's latency hides behind the matrices.
    const bool looks_ahead = tile + 2 < num_tiles && threadIdx.x < kBlockN;
    const SlotOffset ahead = looks_ahead ? slot_of(tile + 2) : SlotOffset{-1, -1};

    float s[L::kWarpKeys / 8][4];
    const int first_key = w.keys.begin + tile * kBlockN;
    multiply_query_key<T, D, L::kPitch>(s, q, warp_query, keys + warp_key * L::kPitch * 2);
    softmax(s, acc, rows, scale, first_key + warp_key, first_key < seen_from || first_key + kBlockN > seen_to);
    multiply_probability_value<T, D, L::kPitch>(acc, s, keys + L::kTileBytes + warp_key * L::kPitch * 2);
    if (looks_ahead) slots[(tile & 1) * kBlockN + threadIdx.x] = ahead;
  }

  // The query's copies may be in flight still when there were no tiles.
  cp_async_wait_all();
  __syncthreads();
  const int group = kWarpsM > 1 ? 0 : warp;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = group * L::kM + warp_row + lane / 4 + 8 * half;
    float l = rows[half].l;
    l += __shfl_xor_sync(0xffffffffu, l, 1);
    l += __shfl_xor_sync(0xffffffffu, l, 2);
    if (lane % 4 == 0) reinterpret_cast<float2*>(smem + L::kStateAt)[m] = make_float2(rows[half].m, l);
    float* to = reinterpret_cast<float*>(stages) + m * L::kAccPitch + lane % 4 * 2;
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      *reinterpret_cast<float2*>(to + d * 8) = make_float2(acc[d][2 * half], acc[d][2 * half + 1]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < L::kM * (D / 4); i += kThreads) {
    const int m = i / (D / 4);
    if (w.first_row + m >= w.num_rows) break;
    store_columns<T, D, kWarpsM>(p, w, plan.num_splits, smem, m, i % (D / 4) * 4, plan.output_aligned);
  }
}

// fp32, without tensor cores: a warp owns one split of one row and head. A lane owns one key of 32 for the softmax and
// columns lane, lane + 32, ... for the products.
template <int D, typename CacheT>
__device__ __forceinline__ void accumulate_keys(const PagedAttentionParams& p, const int32_t* blocks, int kv_head,
                                                KeyRange keys, const float (&q)[D / 32], float scale, float& m,
                                                float& l, float (&acc)[D / 32]) {
  const int lane = threadIdx.x % 32;
  const char* key_head = static_cast<const char*>(p.key_cache) + kv_head * p.key_strides.head * sizeof(CacheT);
  const char* value_head = static_cast<const char*>(p.value_cache) + kv_head * p.value_strides.head * sizeof(CacheT);
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int count = min(32, keys.end - first);
    const SlotOffset slot = lane < count ? find_slot(p, blocks, first + lane) : SlotOffset{-1, -1};
    float score = kNothing;
    for (int j = 0; j < count; ++j) {
      const int64_t offset = __shfl_sync(0xffffffffu, slot.key, j);
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        if (offset >= 0) dot += q[i] * to_float(reinterpret_cast<const CacheT*>(key_head + offset)[lane + 32 * i]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      if (lane == j) score = dot * scale;
    }
    float top = fmaxf(m, score);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    const float alpha = weight_of(m, top);
    const float probability = lane < count ? exp2f(score - (top == kNothing ? 0.0f : top)) : 0.0f;
    float sum = probability;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    l = l * alpha + sum;
    m = top;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) acc[i] *= alpha;
    for (int j = 0; j < count; ++j) {
      const int64_t offset = __shfl_sync(0xffffffffu, slot.value, j);
      const float weight = __shfl_sync(0xffffffffu, probability, j);
      if (offset < 0) continue;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        acc[i] += weight * to_float(reinterpret_cast<const CacheT*>(value_head + offset)[lane + 32 * i]);
      }
    }
  }
}

template <int D>
__global__ void __launch_bounds__(kThreads, 8)
    paged_attention_fp32_kernel(const __grid_constant__ PagedAttentionParams p, const Plan plan) {
  const int lane = threadIdx.x % 32;
  const int item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int head = item % p.num_heads, row = item / p.num_heads;
  const Request request = load_request(p, blockIdx.z);
  if (row >= request.query_len) return;
  const KeyRange range = visible_keys(p.mask, request.seq_len, request.query_len, row);
  const KeySplits splits = split_keys(range, plan.num_splits, kBlockN);
  const int split = blockIdx.y;
  if (split >= max(splits.num_splits, 1)) return;

  const int begin = range.begin + split * splits.keys_per_split;
  const KeyRange keys{begin, min(begin + splits.keys_per_split, range.end)};
  const int64_t t = request.begin + row;
  const float* query =
      static_cast<const float*>(p.query) + t * p.query_strides.row + head * p.query_strides.head;
  const float scale = p.scale * (p.k_scale != nullptr ? p.k_scale[0] : 1.0f) * kLog2E;
  const int32_t* blocks = p.block_table + blockIdx.z * p.block_table_stride;
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  float q[D / 32], acc[D / 32], m = kNothing, l = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    q[i] = query[lane + 32 * i];
    acc[i] = 0.0f;
  }
  if (p.kv_dtype == DType::kFloat8E4M3) {
    accumulate_keys<D, Float8E4M3>(p, blocks, kv_head, keys, q, scale, m, l, acc);
  } else {
    accumulate_keys<D, float>(p, blocks, kv_head, keys, q, scale, m, l, acc);
  }

  if (splits.num_splits > 1) {
    const Partials out = partials(p, plan.num_splits);
    const int64_t at = partial_row(p, split, t, head);
    if (lane == 0) out.state[at] = make_float2(m, l);
#pragma unroll
    for (int i = 0; i < D / 32; ++i) out.acc[at * D + lane + 32 * i] = acc[i];
    return;
  }
  const float factor = output_factor(p, head, m, l);
  float* out = static_cast<float*>(p.output) + t * p.output_strides.row + head * p.output_strides.head;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) out[lane + 32 * i] = factor == 0.0f ? 0.0f : acc[i] * factor;
}

// Merges the splits of rows that had several, in split order. A warp owns one row and head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ PagedAttentionParams p, int max_splits, int tile_m) {
  __shared__ float weights[kThreads / 32][kMaxSplits];
  // Every CTA waits, also one without work: a successor must not start before the partials' kernel is done.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int lane = threadIdx.x % 32;
  const int item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int head = item % p.num_heads, row = item / p.num_heads;
  const Request request = load_request(p, blockIdx.z);
  if (row >= request.query_len) return;

  const int ratio = p.num_heads / p.num_kv_heads;
  const int first = (row * ratio + head % ratio) / tile_m * tile_m;
  const int last = min(first + tile_m, request.query_len * ratio) - 1;
  const KeyRange tile = tile_keys(p.mask, request.seq_len, request.query_len, first / ratio, last / ratio);
  const int num_splits = split_keys(tile, max_splits, kBlockN).num_splits;
  if (num_splits <= 1) return;

  const Partials in = partials(p, max_splits);
  const int64_t t = request.begin + row;
  float top = kNothing;
  for (int s = lane; s < num_splits; s += 32) top = fmaxf(top, in.state[partial_row(p, s, t, head)].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  float l = 0.0f;
  float* weight = weights[threadIdx.x / 32];
  for (int s = lane; s < num_splits; s += 32) {
    const float2 state = in.state[partial_row(p, s, t, head)];
    weight[s] = weight_of(state.x, top);
    l += weight[s] * state.y;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(0xffffffffu, l, step);
  __syncwarp();

  const float factor = output_factor(p, head, top, l);
  T* out = static_cast<T*>(p.output) + t * p.output_strides.row + head * p.output_strides.head;
  const int64_t step = static_cast<int64_t>(p.num_rows) * p.num_heads * p.head_dim;
  for (int column = lane; column < p.head_dim; column += 32) {
    const float* acc = in.acc + partial_row(p, 0, t, head) * p.head_dim + column;
    float sum = 0.0f;
#pragma unroll 4
    for (int s = 0; s < num_splits; ++s) sum += weight[s] * acc[s * step];
    out[column] = from_float<T>(factor == 0.0f ? 0.0f : sum * factor);
  }
}

bool aligned_to(int64_t bytes, const void* pointer, std::initializer_list<int64_t> byte_strides) {
  bool aligned = reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  for (int64_t stride : byte_strides) aligned = aligned && stride % bytes == 0;
  return aligned;
}

Plan make_plan(const PagedAttentionParams& p, int tile_m) {
  const int64_t size = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t kv_size = p.kv_dtype == DType::kFloat8E4M3 ? 1 : size;
  const auto cache_is_aligned = [kv_size](const void* cache, const CacheStrides& s) {
    return aligned_to(16, cache, {s.block * kv_size, s.offset * kv_size, s.head * kv_size});
  };
  Plan plan;
  plan.num_splits = num_splits(p.num_rows, p.num_reqs, p.num_heads, p.num_kv_heads, tile_m, p.max_seq_len,
                               device_properties().num_sms);
  plan.query_aligned = aligned_to(16, p.query, {p.query_strides.row * size, p.query_strides.head * size});
  plan.cache_aligned = cache_is_aligned(p.key_cache, p.key_strides) && cache_is_aligned(p.value_cache, p.value_strides);
  plan.output_aligned = aligned_to(8, p.output, {p.output_strides.row * size, p.output_strides.head * size});
  return plan;
}

// Launched so that its start overlaps the end of the kernel before it.
template <typename T>
cudaError_t launch_combine(const PagedAttentionParams& p, int num_splits, int tile_m, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int64_t items = static_cast<int64_t>(p.max_query_len) * p.num_heads;
  config.gridDim = dim3(static_cast<unsigned>(ceil_div64(items, kThreads / 32)), 1, p.num_reqs);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, combine_kernel<T>, p, num_splits, tile_m);
}

template <typename T, int D, int kWarpsM>
cudaError_t launch_tiles(const PagedAttentionParams& p, cudaStream_t stream) {
  using L = Tile<T, D, kWarpsM>;
  const auto kernel = paged_attention_kernel<T, D, kWarpsM>;
  const Plan plan = make_plan(p, L::kM);
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSmemBytes);
  if (error != cudaSuccess) return error;
  const int64_t packed_rows = static_cast<int64_t>(p.max_query_len) * (p.num_heads / p.num_kv_heads);
  const dim3 grid(static_cast<unsigned>(ceil_div64(packed_rows, L::kM) * p.num_kv_heads), plan.num_splits, p.num_reqs);
  kernel<<<grid, kThreads, L::kSmemBytes, stream>>>(p, plan);
  error = cudaGetLastError();
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<T>(p, plan.num_splits, L::kM, stream);
}

template <int D>
cudaError_t launch_fp32(const PagedAttentionParams& p, cudaStream_t stream) {
  constexpr int kWarps = kThreads / 32;
  const Plan plan = make_plan(p, kWarps);
  const int64_t items = static_cast<int64_t>(p.max_query_len) * p.num_heads;
  const dim3 grid(static_cast<unsigned>(ceil_div64(items, kWarps)), plan.num_splits, p.num_reqs);
  paged_attention_fp32_kernel<D><<<grid, kThreads, 0, stream>>>(p, plan);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<float>(p, plan.num_splits, 1, stream);
}

template <typename T, int D>
cudaError_t launch_head_dim(const PagedAttentionParams& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    return launch_fp32<D>(p, stream);
  } else {
    const bool small = tile_m(p.num_heads, p.num_kv_heads, p.max_query_len) == 16;
    return small ? launch_tiles<T, D, 1>(p, stream) : launch_tiles<T, D, 4>(p, stream);
  }
}

template <typename T>
cudaError_t launch(const PagedAttentionParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return launch_head_dim<T, 64>(p, stream);
    case 96: return launch_head_dim<T, 96>(p, stream);
    case 128: return launch_head_dim<T, 128>(p, stream);
    case 256: return launch_head_dim<T, 256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_paged_attention(const PagedAttentionParams& params, cudaStream_t stream) {
  PagedAttentionParams p = params;
  p.max_query_len = std::min(p.max_query_len, p.num_rows);
  DFLASH_DISPATCH_FLOATING(p.dtype, return launch<scalar_t>(p, stream));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
