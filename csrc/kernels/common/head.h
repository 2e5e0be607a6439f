// SPDX-License-Identifier: Apache-2.0
// One head of one row, owned by kLanes neighbouring lanes that move kN elements at a time: bias,
// RMSNorm, RoPE and the store with its one rounding. The normed head passes through shared memory,
// where RoPE finds the partner elements.
#pragma once

#include "kv_cache.h"
#include "reduce.h"
#include "vec.h"

namespace dflash {

template <typename T>
struct Head {
  const T* x;       // [size]
  const T* bias;    // [size] or null
  const T* weight;  // [size] or null: not normed
  int size;
  float eps;
};

template <int kN>
__device__ __forceinline__ void load_floats(const float* from, float* to) {
  constexpr int kStep = kN < 4 ? kN : 4;
#pragma unroll
  for (int i = 0; i < kN; i += kStep) {
    const Vec<float, kStep> v = load_vec<kStep>(from + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) to[i + j] = v.x[j];
  }
}

template <int kN>
__device__ __forceinline__ void store_floats(const float* from, float* to) {
  constexpr int kStep = kN < 4 ? kN : 4;
#pragma unroll
  for (int i = 0; i < kN; i += kStep) {
    Vec<float, kStep> v;
#pragma unroll
    for (int j = 0; j < kStep; ++j) v.x[j] = from[i + j];
    store_vec<kStep>(to + i, v);
  }
}

template <int kN, typename T>
__device__ __forceinline__ void load_head(const Head<T>& head, int i, float* x) {
  const Vec<T, kN> v = load_vec<kN>(head.x + i);
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] = to_float(v.x[j]);
  if (head.bias == nullptr) return;
  const Vec<T, kN> bias = load_vec<kN>(head.bias + i);
#pragma unroll
  for (int j = 0; j < kN; ++j) x[j] += to_float(bias.x[j]);
}

template <int kN, typename Out>
__device__ __forceinline__ void store_head(const float* x, float scale, Out* out) {
  Vec<Out, kN> v;
#pragma unroll
  for (int j = 0; j < kN; ++j) v.x[j] = to_cache<Out>(x[j], scale);
  store_vec<kN>(out, v);
}

// Cosines and sines of kN elements; interleaved pairs share theirs.
template <int kN>
struct Angles {
  float cosine[kN], sine[kN];
};

// Of elements i .. i + kN; nothing past rotary_dim. A chunk never straddles a half: the launcher
// sees to it.
template <int kN>
__device__ __forceinline__ void load_angles(const RopeTable& rope, const float* cos_sin, int i,
                                            Angles<kN>& angles) {
  if (i >= rope.rotary_dim) return;
  const int half = rope.rotary_dim / 2;
  if (rope.is_neox) {
    const int column = i >= half ? i - half : i;
    load_floats<kN>(cos_sin + column, angles.cosine);
    load_floats<kN>(cos_sin + half + column, angles.sine);
    return;
  }
  constexpr int kPairs = kN == 1 ? 1 : kN / 2;
  load_floats<kPairs>(cos_sin + i / 2, angles.cosine);
  load_floats<kPairs>(cos_sin + half + i / 2, angles.sine);
}

// Elements i .. i + kN of the head, rotated into y.
template <int kN>
__device__ __forceinline__ void rotate_neox(const float* head, int half, int i,
                                            const Angles<kN>& angles, float* y) {
  const bool upper = i >= half;
  float x[kN], partner[kN];
  load_floats<kN>(head + i, x);
  load_floats<kN>(head + (upper ? i - half : i + half), partner);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    y[j] = x[j] * angles.cosine[j] + (upper ? partner[j] : -partner[j]) * angles.sine[j];
  }
}

template <int kN>
__device__ __forceinline__ void rotate_interleaved(const float* head, int i,
                                                   const Angles<kN>& angles, float* y) {
  if constexpr (kN == 1) {
    const float partner = head[i ^ 1];
    y[0] = head[i] * angles.cosine[0] + (i % 2 ? partner : -partner) * angles.sine[0];
  } else {
    float x[kN];
    load_floats<kN>(head + i, x);
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      const float cosine = angles.cosine[j / 2], sine = angles.sine[j / 2];
      y[j] = x[j] * cosine - x[j + 1] * sine;
      y[j + 1] = x[j + 1] * cosine + x[j] * sine;
    }
  }
}

template <int kN>
__device__ __forceinline__ void rotate(const float* head, const RopeTable& rope, int i,
                                       const Angles<kN>& angles, float* y) {
  if (i >= rope.rotary_dim) return load_floats<kN>(head + i, y);
  if (rope.is_neox) return rotate_neox<kN>(head, rope.rotary_dim / 2, i, angles, y);
  rotate_interleaved<kN>(head, i, angles, y);
}

// RMSNorm (with a weight), RoPE at `position`, store where there is a place (out). `scratch` holds
// head.size floats of this group. What the first chunk needs is asked for at once.
template <int kN, int kLanes, typename T, typename Out>
__device__ __forceinline__ void norm_rope_store(const Head<T>& head, const RopeTable& rope,
                                                int64_t position, float scale, float* scratch,
                                                Out* out) {
  const unsigned group = lane_group_mask<kLanes>();
  const int first = threadIdx.x % kLanes * kN;
  const float* cos_sin = rope.cos_sin + position * rope.stride;
  Angles<kN> angles;
  Vec<T, kN> weight;
  if (first < head.size) {
    load_angles<kN>(rope, cos_sin, first, angles);
    if (head.weight != nullptr) weight = load_vec<kN>(head.weight + first);
  }
  float x[kN];
  float sum = 0.0f;
  for (int i = first; i < head.size; i += kLanes * kN) {
    load_head<kN>(head, i, x);
#pragma unroll
    for (int j = 0; j < kN; ++j) sum += x[j] * x[j];
    store_floats<kN>(x, scratch + i);
  }
  if (head.weight != nullptr) {
    const float mean = lane_group_sum<kLanes>(sum, group) / static_cast<float>(head.size);
    const float inverse = 1.0f / sqrtf(mean + head.eps);
    for (int i = first; i < head.size; i += kLanes * kN) {
      if (i != first) weight = load_vec<kN>(head.weight + i);
      load_floats<kN>(scratch + i, x);
#pragma unroll
      for (int j = 0; j < kN; ++j) x[j] *= inverse * to_float(weight.x[j]);
      store_floats<kN>(x, scratch + i);
    }
  }
  __syncwarp(group);
  if (out == nullptr) return;
  for (int i = first; i < head.size; i += kLanes * kN) {
    if (i != first) load_angles<kN>(rope, cos_sin, i, angles);
    rotate<kN>(scratch, rope, i, angles, x);
    store_head<kN>(x, scale, out + i);
  }
}

// V: bias, value_scale, store.
template <int kN, int kLanes, typename T, typename Out>
__device__ __forceinline__ void scale_store(const Head<T>& head, float value_scale, float scale,
                                            Out* out) {
  for (int i = threadIdx.x % kLanes * kN; i < head.size; i += kLanes * kN) {
    float x[kN];
    load_head<kN>(head, i, x);
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] *= value_scale;
    store_head<kN>(x, scale, out + i);
  }
}

inline bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether the table's rows can be read kN columns at a time by chunks that lie in one half.
template <int kN>
bool rope_is_vectorizable(const RopeTable& rope) {
  return is_aligned(rope.cos_sin, 16) && rope.stride % 4 == 0 && rope.rotary_dim % (2 * kN) == 0;
}

// Whether every head of the cache can be written kN elements at a time.
template <int kN, typename T>
bool cache_is_vectorizable(const KvCache& cache) {
  return is_aligned(cache.data, kN * sizeof(T)) && cache.block_stride % kN == 0 &&
         cache.token_stride % kN == 0 && cache.head_stride % kN == 0;
}

}  // namespace dflash

// Runs the body with `kLanes` bound to the least group (8, 16 or 32 lanes) that holds `chunks`
// chunks at once.
#define DFLASH_DISPATCH_LANES(chunks, ...) \
  do {                                     \
    if ((chunks) <= 8) {                   \
      constexpr int kLanes = 8;            \
      __VA_ARGS__;                         \
    } else if ((chunks) <= 16) {           \
      constexpr int kLanes = 16;           \
      __VA_ARGS__;                         \
    } else {                               \
      constexpr int kLanes = 32;           \
      __VA_ARGS__;                         \
    }                                      \
  } while (0)
