// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/kv_cache.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

struct QkNormRopeStoreParams {
  const void* qkv;              // [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]
  const void* q_norm_weight;    // [head_dim] or null
  const void* k_norm_weight;    // [head_dim] or null
  const int64_t* positions;     // [num_rows]
  const int64_t* slot_mapping;  // [num_rows]; negative = K and V are not stored
  const float* k_scale;         // [1] or null; fp8 caches
  const float* v_scale;
  void* query;  // [num_rows, num_heads, head_dim]
  KvCache key_cache;
  KvCache value_cache;
  RopeTable rope;
  int64_t num_rows;
  int64_t kv_block_size;
  int64_t qkv_stride;
  int64_t query_row_stride;
  int64_t query_head_stride;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float eps;
  float value_scale;
  DType dtype;
  DType cache_dtype;
};

namespace cpu {
void qk_norm_rope_store(const QkNormRopeStoreParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_qk_norm_rope_store(const QkNormRopeStoreParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
