// SPDX-License-Identifier: Apache-2.0
#pragma once

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
  RowStrides query_strides, output_strides;  // in elements, like every stride here
  CacheStrides key_strides, value_strides;
  int64_t block_table_stride;
  int num_rows, num_reqs, num_heads, num_kv_heads, head_dim;
  int num_blocks, kv_block_size;
  int max_query_len, max_seq_len;
  int num_splits;  // of the keys; 0 = as many as fill the device
  bool portable;   // the kernel of every architecture, also where there is a faster one
  float scale;
  KeyMask mask;
  DType dtype, kv_dtype;
};

namespace attention {

inline constexpr int kMaxSplits = 8;  // splits are powers of two

inline bool splits_are_valid(int64_t num_splits) {
  return num_splits >= 0 && num_splits <= kMaxSplits && (num_splits & (num_splits - 1)) == 0;
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
