// SPDX-License-Identifier: Apache-2.0
// What the attention kernels share: a request's lengths, slot lookup, staging of rows into shared
// memory and the merge of partial softmax results (m, l, acc), with m in units of log2.
#pragma once

#include "../paged_attention.h"
#include "mma.h"
#include "vec.h"

namespace dflash::attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kNothing = -INFINITY;  // m of an empty set of keys

// Request r: rows [begin, begin + query_len), never past num_rows whatever the device holds.
struct Request {
  int begin;
  int query_len;
  int seq_len;
};

__device__ __forceinline__ Request load_request(const PagedAttentionParams& p, int r) {
  const int seq_len = p.seq_lens[r];
  const int begin = min(max(p.query_start_loc[r], 0), p.num_rows);
  const int end = min(p.query_start_loc[r + 1], p.num_rows);
  return {begin, max(end - begin, 0), seq_len};
}

__device__ __forceinline__ int64_t element_size(DType type) {
  return type == DType::kFloat8E4M3 ? 1 : (type == DType::kFloat32 ? 4 : 2);
}

// Byte offsets of a key's K and V row, without the head. Negative, and still a multiple of 16, for
// a block that is not in the cache: it reads as zeros.
struct alignas(16) SlotOffset {
  int64_t key, value;
};

constexpr SlotOffset kNoSlot{INT64_MIN, INT64_MIN};

__device__ __forceinline__ SlotOffset slot_in_block(const PagedAttentionParams& p, int64_t block,
                                                    int offset) {
  if (block < 0 || block >= p.num_blocks) return kNoSlot;
  const int64_t size = element_size(p.kv_dtype);
  return {(block * p.key_strides.block + offset * p.key_strides.offset) * size,
          (block * p.value_strides.block + offset * p.value_strides.offset) * size};
}

// Rows of a fragment's thread: lane / 4 and 8 further.
struct RowState {
  KeyRange keys;
  float m = kNothing;
  float l = 0.0f;  // this thread's columns only, until the end
};

// Probabilities of 16 keys as the A operand.
template <typename T>
__device__ __forceinline__ void pack_probabilities(uint32_t (&a)[4], const float (&low)[4],
                                                   const float (&high)[4]) {
  a[0] = pack2<T>(low[0], low[1]);
  a[1] = pack2<T>(low[2], low[3]);
  a[2] = pack2<T>(high[0], high[1]);
  a[3] = pack2<T>(high[2], high[3]);
}

// exp2 of a difference to a maximum: denormal results become 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// exp2(m - base), 0 for the empty set even when everything is empty.
__device__ __forceinline__ float weight_of(float m, float base) {
  return m == kNothing ? 0.0f : exp2_fast(m - base);
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
