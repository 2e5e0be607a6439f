// SPDX-License-Identifier: Apache-2.0
// One item (attention_items.h) at a time. Rows lie in the vector lanes: K and V elements are
// broadcast straight from the cache, scores and output are transposed, and the softmax needs no
// horizontal step. Splits and blocks of keys end at absolute positions, so that results do not
// depend on the thread count and, with num_splits, neither on what stands beside a row.
#include "attention_items.h"

#include <atomic>
#include <cstring>
#include <memory>

#include "simd.h"

namespace dflash::cpu {
namespace {

constexpr int kMaxHeadDim = 256;
constexpr int kBlockKeys = 64;
constexpr int64_t kSerialBelow = 200000;  // multiply-adds of q k^T; a second thread needs more
constexpr float kNothing = -1e30f;  // m of an empty set of keys; finite, so that differences are
typedef float FloatVector __attribute__((vector_size(kLanes * sizeof(float)), may_alias));

// A partial result is m [lanes], l [lanes] and the transposed acc [head_dim][lanes].
struct Scratch {
  alignas(32) float part[(2 + kMaxHeadDim) * kTileM];
  alignas(32) float query[kMaxHeadDim * kTileM];  // [head_dim][lanes]
  alignas(32) float scores[kBlockKeys * kTileM];  // [key][lanes]
  float rows[kBlockKeys * kMaxHeadDim];           // of K or V
};

// Rows of K or V as floats, one after the other, so that they share the first-level cache with what
// they meet; zeros for a block that is not in the cache and up to the next multiple of kLanes.
template <typename CacheT>
DFLASH_INLINE void load_rows(const PagedAttentionParams& p, const void* cache,
                             const CacheStrides& strides, const Item& item, int first, int count,
                             float* rows) {
  const int32_t* blocks = p.block_table + item.req * p.block_table_stride;
  const CacheT* head = static_cast<const CacheT*>(cache) + item.kv_head * strides.head;
  for (int j = 0; j < count; ++j) {
    const int page = (first + j) / p.kv_block_size;
    const int64_t block = blocks[page];
    float* to = rows + j * p.head_dim;
    if (block < 0 || block >= p.num_blocks) {
      for (int d = 0; d < p.head_dim; ++d) to[d] = 0.0f;
      continue;
    }
    const CacheT* row =
        head + block * strides.block + (first + j - page * p.kv_block_size) * strides.offset;
    for (int d = 0; d < p.head_dim; ++d) to[d] = to_float(row[d]);
  }
  for (int i = count * p.head_dim; i % (kLanes * p.head_dim) != 0; ++i) rows[i] = 0.0f;
}

// scores[key][lane] = sum over d of keys[key][d] * query[d][lane].
template <int kVectors>
DFLASH_INLINE void multiply_query_key(const float* query, const float* keys, int count,
                                      int head_dim, float* scores) {
  constexpr int kKeys = kVectors == 1 ? 8 : 4;
  for (int first = 0; first < count; first += kKeys) {
    FloatVector sum[kKeys][kVectors] = {};
    const float* k = keys + first * head_dim;
    for (int d = 0; d < head_dim; ++d) {
      const FloatVector* q = reinterpret_cast<const FloatVector*>(query + d * kVectors * kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; ++j) {
        const float x = k[j * head_dim + d];
#pragma GCC unroll 3
        for (int v = 0; v < kVectors; ++v) sum[j][v] += q[v] * x;
      }
    }
    std::memcpy(scores + first * kVectors * kLanes, sum, sizeof(sum));
  }
}

// acc[d][lane] += sum over keys of values[key][d] * probabilities[key][lane].
template <int kVectors>
DFLASH_INLINE void multiply_probability_value(const float* probabilities, const float* values,
                                              int count, int head_dim, float* acc) {
  constexpr int kColumns = kVectors == 1 ? 8 : 4;
  for (int first = 0; first < head_dim; first += kColumns) {
    FloatVector sum[kColumns][kVectors];
    std::memcpy(sum, acc + first * kVectors * kLanes, sizeof(sum));
    for (int key = 0; key < count; ++key) {
      const float* value = values + key * head_dim + first;
      const FloatVector* p =
          reinterpret_cast<const FloatVector*>(probabilities + key * kVectors * kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < kColumns; ++j) {
        const float x = value[j];
#pragma GCC unroll 3
        for (int v = 0; v < kVectors; ++v) sum[j][v] += p[v] * x;
      }
    }
    std::memcpy(acc + first * kVectors * kLanes, sum, sizeof(sum));
  }
}

// Scores to probabilities; rescales acc. What a row does not see is replaced, not added to: its
// slot may hold anything.
template <int kVectors>
DFLASH_INLINE void softmax(const KeyRange* seen, int first, int count, bool masked, float scale,
                           int head_dim, float* scores, float* part) {
  constexpr int kM = kVectors * kLanes;
  float *m = part, *l = part + kM, *acc = part + 2 * kM;
  float top[kM], alpha[kM], sum[kM];
  for (int i = 0; i < kM; ++i) top[i] = m[i];
  for (int key = 0; key < count; ++key) {
    float* s = scores + key * kM;
    for (int i = 0; i < kM; ++i) {
      const bool hidden = masked && (first + key < seen[i].begin || first + key >= seen[i].end);
      s[i] = hidden ? kNothing : s[i] * scale;
      top[i] = s[i] > top[i] ? s[i] : top[i];
    }
  }
  for (int i = 0; i < kM; ++i) {
    alpha[i] = fast_exp(m[i] - top[i]);
    m[i] = top[i];
    sum[i] = 0.0f;
  }
  for (int key = 0; key < count; ++key) {
    float* s = scores + key * kM;
    for (int i = 0; i < kM; ++i) {
      // Computed for hidden keys too: a conditional exp would not vectorise.
      const float e = fast_exp(s[i] - top[i]);
      s[i] = s[i] == kNothing ? 0.0f : e;
      sum[i] += s[i];
    }
  }
  for (int i = 0; i < kM; ++i) l[i] = l[i] * alpha[i] + sum[i];
  for (int d = 0; d < head_dim; ++d) {
    for (int i = 0; i < kM; ++i) acc[d * kM + i] *= alpha[i];
  }
}

// The tile's query rows, transposed, and what each sees; lanes past the last row repeat it.
template <typename T>
DFLASH_INLINE void load_query(const PagedAttentionParams& p, const Item& item, float* to,
                              KeyRange* seen) {
  const int ratio = p.num_heads / p.num_kv_heads, lanes = num_lanes(item.num_rows);
  int begin;
  const int query_len = request_rows(p, item.req, &begin);
  for (int i = 0; i < lanes; ++i) {
    const int packed = item.first_row + std::min(i, item.num_rows - 1);
    const int64_t row = begin + packed / ratio, head = item.kv_head * ratio + packed % ratio;
    const T* query =
        static_cast<const T*>(p.query) + row * p.query_strides.row + head * p.query_strides.head;
    for (int d = 0; d < p.head_dim; ++d) to[d * lanes + i] = to_float(query[d]);
    seen[i] = visible_keys(p.mask, p.seq_lens[item.req], query_len, packed / ratio);
  }
}

template <typename CacheT, int kVectors>
DFLASH_INLINE void attend(const PagedAttentionParams& p, const Item& item, Scratch& scratch,
                          float* part) {
  constexpr int kM = kVectors * kLanes;
  KeyRange seen[kM];
  DFLASH_DISPATCH_FLOATING(p.dtype, load_query<scalar_t>(p, item, scratch.query, seen));
  for (int i = 0; i < kM; ++i) part[i] = kNothing;
  for (int i = kM; i < kM * (2 + p.head_dim); ++i) part[i] = 0.0f;

  const float scale = p.scale * (p.k_scale != nullptr ? p.k_scale[0] : 1.0f);
  int count;
  for (int first = item.keys.begin; first < item.keys.end; first += count) {
    count = std::min(kBlockKeys - first % kBlockKeys, item.keys.end - first);
    load_rows<CacheT>(p, p.key_cache, p.key_strides, item, first, count, scratch.rows);
    multiply_query_key<kVectors>(scratch.query, scratch.rows, count, p.head_dim, scratch.scores);
    const bool masked = first < seen[kM - 1].begin || first + count > seen[0].end;
    softmax<kVectors>(seen, first, count, masked, scale, p.head_dim, scratch.scores, part);
    load_rows<CacheT>(p, p.value_cache, p.value_strides, item, first, count, scratch.rows);
    multiply_probability_value<kVectors>(scratch.scores, scratch.rows, count, p.head_dim,
                                         part + 2 * kM);
  }
}

template <typename CacheT>
DFLASH_INLINE void attend_lanes(const PagedAttentionParams& p, const Item& item, Scratch& scratch,
                                float* part) {
  switch (num_lanes(item.num_rows) / kLanes) {
    case 1: return attend<CacheT, 1>(p, item, scratch, part);
    case 2: return attend<CacheT, 2>(p, item, scratch, part);
    default: return attend<CacheT, 3>(p, item, scratch, part);
  }
}

DFLASH_CPU_CLONES void attend_item(const PagedAttentionParams& p, const Item& item,
                                   Scratch& scratch, float* part) {
  switch (p.kv_dtype) {
    case DType::kFloat32: return attend_lanes<float>(p, item, scratch, part);
    case DType::kFloat16: return attend_lanes<Half>(p, item, scratch, part);
    case DType::kBFloat16: return attend_lanes<BFloat16>(p, item, scratch, part);
    default: return attend_lanes<Float8E4M3>(p, item, scratch, part);
  }
}

// Merges the splits of a tile in order, joins the sink (one logit, no value) and stores.
template <typename T>
DFLASH_INLINE void store(const PagedAttentionParams& p, const Item& item, const float* parts) {
  const int ratio = p.num_heads / p.num_kv_heads, lanes = num_lanes(item.num_rows);
  const int part_size = lanes * (2 + p.head_dim);
  int begin;
  request_rows(p, item.req, &begin);
  for (int i = 0; i < item.num_rows; ++i) {
    const int packed = item.first_row + i;
    const int64_t row = begin + packed / ratio, head = item.kv_head * ratio + packed % ratio;
    float m = p.sinks != nullptr ? p.sinks[head] : kNothing;
    for (int s = 0; s < item.num_splits; ++s) m = std::max(m, parts[s * part_size + i]);
    float l = p.sinks != nullptr ? std::exp(p.sinks[head] - m) : 0.0f;
    float values[kMaxHeadDim] = {};
    for (int s = 0; s < item.num_splits; ++s) {
      const float* part = parts + s * part_size + i;
      if (part[lanes] == 0.0f) continue;
      const float weight = std::exp(part[0] - m);
      l += weight * part[lanes];
      for (int d = 0; d < p.head_dim; ++d) values[d] += weight * part[(2 + d) * lanes];
    }
    const float factor = l == 0.0f ? 0.0f : (p.v_scale != nullptr ? p.v_scale[0] : 1.0f) / l;
    T* output =
        static_cast<T*>(p.output) + row * p.output_strides.row + head * p.output_strides.head;
    for (int d = 0; d < p.head_dim; ++d) output[d] = from_float<T>(values[d] * factor);
  }
}

DFLASH_CPU_CLONES void store_item(const PagedAttentionParams& p, const Item& item,
                                  const float* parts) {
  DFLASH_DISPATCH_FLOATING(p.dtype, store<scalar_t>(p, item, parts));
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  const std::vector<Item> tiles = make_tiles(p);
  int64_t part_floats = 0;
  const std::vector<Item> items = split_tiles(p, tiles, &part_floats);
  const std::unique_ptr<float[]> parts(new float[part_floats]);
  std::vector<std::atomic<int>> left(tiles.size());
  for (const Item& item : items) left[item.tile].store(item.num_splits, std::memory_order_relaxed);

  // Items are taken one by one, since their lengths differ; who finishes a tile last merges it.
  const int64_t count = static_cast<int64_t>(items.size());
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    Scratch scratch;
    for (int64_t i = next++; i < count; i = next++) {
      const Item& item = items[i];
      const bool split = item.num_splits > 1;
      const int64_t part_size = int64_t{num_lanes(item.num_rows)} * (2 + p.head_dim);
      attend_item(p, item, scratch,
                  split ? parts.get() + item.part + item.split * part_size : scratch.part);
      if (left[item.tile].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
      store_item(p, item, split ? parts.get() + item.part : scratch.part);
    }
  };
  parallel_for(count, total_products(items, p.head_dim) < kSerialBelow ? count : 1, work);
}

}  // namespace dflash::cpu
