// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/gemm_plan.h"
#include "common/kv_cache.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dflash {

// Layers of one call: they travel in the kernel's parameters.
inline constexpr int kMaxContextLayers = 64;

struct ContextLayer {
  KvCache key_cache;
  KvCache value_cache;
  const int64_t* slot_mapping;  // [num_rows] of the layer's group; negative = not stored
  int64_t kv_block_size;
};

// What follows the GEMM, and for few rows the GEMM itself: bias, k_norm, RoPE, value_scale and the
// store into every layer's cache.
struct PrecomputeContextKvParams {
  const void* kv;  // [num_rows, num_layers, 2, num_kv_heads, head_dim], contiguous; or null
  gemm::Operands product;     // what makes kv where there is none: normed rows and kv_weight
  const void* kv_bias;        // [num_layers, 2, num_kv_heads, head_dim] or null
  const void* k_norm_weight;  // [num_layers, head_dim] or null
  const int64_t* positions;   // [num_rows]
  const float* k_scales;      // [num_layers] or null; fp8 caches
  const float* v_scales;
  RopeTable rope;
  int64_t num_rows;
  int num_layers;
  int num_kv_heads;
  int head_dim;
  float eps;
  float value_scale;
  DType dtype;
  DType cache_dtype;
  ContextLayer layers[kMaxContextLayers];
};

namespace cpu {
void precompute_context_kv(const PrecomputeContextKvParams& params);
}

#ifdef DFLASH_CUDA
cudaError_t launch_precompute_context_kv(const PrecomputeContextKvParams& params,
                                         cudaStream_t stream);

// Whether one kernel makes kv and stores it: at most 64 rows, heads of 64 or 128 in 16-byte steps.
// sm_90.
bool can_project_context_kv(const PrecomputeContextKvParams& params);
cudaError_t launch_project_context_kv(const PrecomputeContextKvParams& params,
                                      cudaStream_t stream);
#endif

}  // namespace dflash
