// SPDX-License-Identifier: Apache-2.0
// What the attention kernels share: a request's lengths, slot lookup, staging of rows into shared
// memory and the merge of partial softmax results (m, l, acc), with m in units of log2.
#pragma once

#include "../paged_attention.h"
#include "mma.h"
#include "vec.h"

namespace dflash::attention {

constexpr int kThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNothing = -INFINITY;  // m of an empty set of keys

// What the host decides for a launch.
struct Plan {
  int num_splits;
  bool query_aligned, cache_aligned, output_aligned;
};

// Request blockIdx.z: rows [begin, begin + query_len), never past num_rows whatever the device
// holds.
struct Request {
  int begin;
  int query_len;
  int seq_len;
};

__device__ __forceinline__ Request load_request(const PagedAttentionParams& p, int r) {
  const int begin = min(max(p.query_start_loc[r], 0), p.num_rows);
  const int end = min(p.query_start_loc[r + 1], p.num_rows);
  return {begin, max(end - begin, 0), p.seq_lens[r]};
}

__device__ __forceinline__ int64_t element_size(DType type) {
  return type == DType::kFloat8E4M3 ? 1 : (type == DType::kFloat32 ? 4 : 2);
}

// Byte offsets of a key's K and V row, without the head; -1 for a block that is not in the cache
// (it reads as zeros).
struct SlotOffset {
  int64_t key, value;
};

__device__ __forceinline__ SlotOffset find_slot(const PagedAttentionParams& p,
                                                const int32_t* blocks, int key) {
  const unsigned page = static_cast<unsigned>(key) / static_cast<unsigned>(p.kv_block_size);
  const int64_t offset = key - static_cast<int64_t>(page) * p.kv_block_size;
  const int64_t block = blocks[page];
  if (block < 0 || block >= p.num_blocks) return {-1, -1};
  const int64_t size = element_size(p.kv_dtype);
  return {(block * p.key_strides.block + offset * p.key_strides.offset) * size,
          (block * p.value_strides.block + offset * p.value_strides.offset) * size};
}

// 16 bytes of a row into shared memory; zeros where `offset` < 0. Unaligned rows go byte by byte.
__device__ __forceinline__ void stage_16(void* dst, const void* rows, int64_t offset, int column,
                                         bool aligned) {
  const bool valid = offset >= 0;
  const uint8_t* src = static_cast<const uint8_t*>(rows) + (valid ? offset + column : 0);
  if (aligned) return cp_async_16(dst, src, valid);
  for (int i = 0; i < 16; ++i) static_cast<uint8_t*>(dst)[i] = valid ? src[i] : 0;
}

// exp2(m - base), 0 for the empty set even when everything is empty.
__device__ __forceinline__ float weight_of(float m, float base) {
  return m == kNothing ? 0.0f : exp2f(m - base);
}

// Partial results in the workspace: acc [split, row, head, D], then (m, l) [split, row, head].
struct Partials {
  float* acc;
  float2* state;
};

__device__ __forceinline__ Partials partials(const PagedAttentionParams& p, int num_splits) {
  float* acc = static_cast<float*>(p.workspace);
  const int64_t rows = static_cast<int64_t>(num_splits) * p.num_rows * p.num_heads;
  return {acc, reinterpret_cast<float2*>(acc + rows * p.head_dim)};
}

__device__ __forceinline__ int64_t partial_row(const PagedAttentionParams& p, int split,
                                               int64_t row, int head) {
  return (static_cast<int64_t>(split) * p.num_rows + row) * p.num_heads + head;
}

// What turns acc into the output: v_scale / (l + the sink's share). A sink joins here, once, and
// carries no value.
__device__ __forceinline__ float output_factor(const PagedAttentionParams& p, int head, float m,
                                               float l) {
  if (l == 0.0f) return 0.0f;
  const float v_scale = p.v_scale != nullptr ? p.v_scale[0] : 1.0f;
  if (p.sinks == nullptr) return v_scale / l;
  const float sink = p.sinks[head] * kLog2E;
  // Relative to m, so that acc needs no second scaling: a sink far above m gives 1 / inf = 0.
  return v_scale / (l + exp2f(sink - m));
}

}  // namespace dflash::attention
