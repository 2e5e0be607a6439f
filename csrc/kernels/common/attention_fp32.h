// SPDX-License-Identifier: Apache-2.0
// fp32, without tensor cores: a warp owns one split of the keys of one row and head. A lane owns
// one key of 32 for the softmax and columns lane, lane + 32, ... for the products.
#pragma once

#include "attention_tile.h"

namespace dflash::attention {

template <int D, typename CacheT>
__device__ __forceinline__ void accumulate_keys(const PagedAttentionParams& p,
                                                const int32_t* blocks, int kv_head, KeyRange keys,
                                                const float (&q)[D / 32], float scale, float& m,
                                                float& l, float (&acc)[D / 32]) {
  const int lane = threadIdx.x % 32;
  const char* key_head =
      static_cast<const char*>(p.key_cache) + kv_head * p.key_strides.head * sizeof(CacheT);
  const char* value_head =
      static_cast<const char*>(p.value_cache) + kv_head * p.value_strides.head * sizeof(CacheT);
  for (int first = keys.begin; first < keys.end; first += 32) {
    const int count = min(32, keys.end - first);
    const SlotOffset slot = lane < count ? find_slot(p, blocks, first + lane) : SlotOffset{-1, -1};
    float score = kNothing;
    for (int j = 0; j < count; ++j) {
      const int64_t offset = __shfl_sync(0xffffffffu, slot.key, j);
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        if (offset >= 0)
          dot += q[i] * to_float(reinterpret_cast<const CacheT*>(key_head + offset)[lane + 32 * i]);
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
      if (lane == j) score = dot * scale;
    }
    float top = fmaxf(m, score);
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
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
        acc[i] +=
            weight * to_float(reinterpret_cast<const CacheT*>(value_head + offset)[lane + 32 * i]);
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
  float* out =
      static_cast<float*>(p.output) + t * p.output_strides.row + head * p.output_strides.head;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) out[lane + 32 * i] = factor == 0.0f ? 0.0f : acc[i] * factor;
}

}  // namespace dflash::attention
