// SPDX-License-Identifier: Apache-2.0
// fp32, without tensor cores: a CTA owns one row and head, a warp one split of its keys. A lane
// owns one key of 32 for the softmax and columns lane, lane + 32, ... for the products.
#pragma once

#include "attention_tile.h"

namespace dflash::attention {

constexpr int kFp32Splits = 8;

// One step of 32 keys joins m, l and acc.
template <int D, typename CacheT>
__device__ __forceinline__ void accumulate_keys(const PagedAttentionParams& p,
                                                const int32_t* blocks, int kv_head, int first,
                                                KeyRange keys, const float (&q)[D / 32],
                                                float scale, float& m, float& l,
                                                float (&acc)[D / 32]) {
  const int lane = threadIdx.x % 32, key = first + lane;
  const char* key_head =
      static_cast<const char*>(p.key_cache) + kv_head * p.key_strides.head * sizeof(CacheT);
  const char* value_head =
      static_cast<const char*>(p.value_cache) + kv_head * p.value_strides.head * sizeof(CacheT);
  const bool visible = key >= keys.begin && key < keys.end;
  SlotOffset slot = kNoSlot;
  if (visible) {
    const int page = key / p.kv_block_size;
    slot = slot_in_block(p, blocks[page], key - page * p.kv_block_size);
  }
  float score = kNothing;
#pragma unroll 4
  for (int j = 0; j < 32; ++j) {
    const int64_t offset = __shfl_sync(0xffffffffu, slot.key, j);
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      if (offset >= 0)
        dot += q[i] * to_float(reinterpret_cast<const CacheT*>(key_head + offset)[lane + 32 * i]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
    if (lane == j && visible) score = dot * scale;
  }
  float top = fmaxf(m, score);
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  const float alpha = weight_of(m, top);
  const float probability = exp2f(score - (top == kNothing ? 0.0f : top));
  float sum = probability;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  l = l * alpha + sum;
  m = top;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) acc[i] *= alpha;
#pragma unroll 4
  for (int j = 0; j < 32; ++j) {
    const int64_t offset = __shfl_sync(0xffffffffu, slot.value, j);
    const float weight = __shfl_sync(0xffffffffu, probability, j);
    if (offset < 0) continue;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      acc[i] +=
          weight * to_float(reinterpret_cast<const CacheT*>(value_head + offset)[lane + 32 * i]);
    }
  }
}

template <int D>
__global__ void __launch_bounds__(32 * kFp32Splits, 4)
    paged_attention_fp32_kernel(const __grid_constant__ PagedAttentionParams p) {
  __shared__ float2 states[kFp32Splits];
  __shared__ float accs[kFp32Splits][D];
  const int lane = threadIdx.x % 32, split = threadIdx.x / 32;
  const int head = blockIdx.x % p.num_heads, row = blockIdx.x / p.num_heads;
  const Request request = load_request(p, blockIdx.y);
  if (row >= request.query_len) return;
  const KeyRange keys = visible_keys(p.mask, request.seq_len, request.query_len, row);
  const Deal deal = deal_steps(keys, 32, kFp32Splits, split);

  const int64_t t = request.begin + row;
  const float* query =
      static_cast<const float*>(p.query) + t * p.query_strides.row + head * p.query_strides.head;
  const float scale = p.scale * (p.k_scale != nullptr ? p.k_scale[0] : 1.0f) * kLog2E;
  const int32_t* blocks = p.block_table + blockIdx.y * p.block_table_stride;
  const int kv_head = head / (p.num_heads / p.num_kv_heads);
  float q[D / 32], acc[D / 32], m = kNothing, l = 0.0f;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    q[i] = query[lane + 32 * i];
    acc[i] = 0.0f;
  }
  for (int i = 0; i < deal.count; ++i) {
    const int first = (deal.first + i * kFp32Splits) * 32;
    if (p.kv_dtype == DType::kFloat8E4M3) {
      accumulate_keys<D, Float8E4M3>(p, blocks, kv_head, first, keys, q, scale, m, l, acc);
    } else {
      accumulate_keys<D, float>(p, blocks, kv_head, first, keys, q, scale, m, l, acc);
    }
  }
  if (lane == 0) states[split] = make_float2(m, l);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) accs[split][lane + 32 * i] = acc[i];
  __syncthreads();

  float top = kNothing, total = 0.0f;
#pragma unroll
  for (int s = 0; s < kFp32Splits; ++s) top = fmaxf(top, states[s].x);
#pragma unroll
  for (int s = 0; s < kFp32Splits; ++s) total += weight_of(states[s].x, top) * states[s].y;
  const float factor = output_factor(p, head, top, total);
  float* out =
      static_cast<float*>(p.output) + t * p.output_strides.row + head * p.output_strides.head;
  for (int column = threadIdx.x; column < D; column += 32 * kFp32Splits) {
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < kFp32Splits; ++s) sum += weight_of(states[s].x, top) * accs[s][column];
    out[column] = factor == 0.0f ? 0.0f : sum * factor;
  }
}

}  // namespace dflash::attention
