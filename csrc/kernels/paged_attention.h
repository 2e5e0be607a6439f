// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "common/key_range.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct RowStrides {
  int64_t row, head;
};

struct CacheStrides {
  int64_t block, offset, head;
};

struct PagedAttentionParams {
  const void* query;               // [num_rows, num_heads, head_dim]
  const void* key_cache;           // [num_blocks, kv_block_size, num_kv_heads, head_dim]
  const void* value_cache;         // [num_blocks, kv_block_size, num_kv_heads, head_dim]
  const int32_t* block_table;      // [num_reqs, *]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const float* sinks;              // [num_heads] or null
  const float* k_scale;            // [1] or null
  const float* v_scale;            // [1] or null
  void* output;                    // [num_rows, num_heads, head_dim]
  void* workspace;
  RowStrides query_strides, output_strides;  // in elements, like every stride here
  CacheStrides key_strides, value_strides;
  int64_t block_table_stride;
  int num_rows, num_reqs, num_heads, num_kv_heads, head_dim;
  int num_blocks, kv_block_size;
  int max_query_len, max_seq_len;
  float scale;
  KeyMask mask;
  DType dtype, kv_dtype;
};

namespace attention {

inline constexpr int kBlockN = 64;  // keys of a tile, and what splits are multiples of
inline constexpr int kMaxSplits = 128;
inline constexpr int kCtasPerSm = 2;
inline constexpr int kMaxSms =
    160;  // more are not counted on, so that a size holds for every shipped device

// Rows of the MMA: query rows x heads of one K/V group.
inline int tile_m(int num_heads, int num_kv_heads, int max_query_len) {
  return static_cast<int64_t>(max_query_len) * (num_heads / num_kv_heads) <= 16 ? 16 : 64;
}

inline int64_t ceil_div64(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Splits that fill the device; the lengths, known to the device alone, decide how many of them have
// work.
inline int num_splits(int64_t num_rows, int64_t num_reqs, int num_heads, int num_kv_heads,
                      int tile_m, int64_t max_seq_len, int num_sms) {
  const int64_t packed_rows = num_rows * (num_heads / num_kv_heads);
  const int64_t tiles =
      std::max(ceil_div64(packed_rows, tile_m), std::min(num_rows, num_reqs)) * num_kv_heads;
  const int64_t by_device =
      static_cast<int64_t>(kCtasPerSm) * std::min(num_sms, kMaxSms) / std::max<int64_t>(tiles, 1);
  const int64_t by_keys = ceil_div64(max_seq_len, kBlockN);
  return static_cast<int>(
      std::max<int64_t>(std::min({by_device, by_keys, int64_t{kMaxSplits}}), 1));
}

// Bytes of the partial results: num_splits x num_rows x num_heads x (head_dim + 2) floats, bounded
// over every batch within the limits, from num_splits * tiles <= kCtasPerSm * kMaxSms. Grows with
// each limit.
inline int64_t workspace_size(int64_t num_rows, int num_heads, int num_kv_heads, int head_dim,
                              int max_query_len, int64_t max_seq_len) {
  const int64_t most_splits = std::min<int64_t>(ceil_div64(max_seq_len, kBlockN), kMaxSplits);
  if (most_splits <= 1) return 0;
  const int64_t by_device =
      static_cast<int64_t>(kCtasPerSm) * kMaxSms * tile_m(num_heads, num_kv_heads, max_query_len);
  return std::min(most_splits * num_rows * num_heads, by_device) * (head_dim + 2) *
         static_cast<int64_t>(sizeof(float));
}

}  // namespace attention

namespace cpu {
void paged_attention(const PagedAttentionParams& params);
}

#ifdef DFLASH_CUDA
// head_dim is 64, 96, 128 or 256.
cudaError_t launch_paged_attention(const PagedAttentionParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
