// SPDX-License-Identifier: Apache-2.0
// One head of one row, owned by kLanes neighbouring lanes that move kN elements at a time: bias,
// RMSNorm, RoPE and the store with its one rounding. RoPE finds partners in shared memory.
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

// Elements i .. i + kN of a normed head in its scratch, quads of a lane a plane apart: neighbouring
// lanes meet no bank conflict.
template <int kN>
struct Scratch {
  static constexpr int kQuad = kN < 4 ? kN : 4;
  float* data;  // [kN / kQuad, size / kN, kQuad]
  int size;

  __device__ __forceinline__ float* quad(int i, int j) const {
    return data + (j * size + i) / kN * kQuad;
  }

  __device__ __forceinline__ void put(int i, const float* x) const {
#pragma unroll
    for (int j = 0; j < kN; j += kQuad) {
      Vec<float, kQuad> v;
#pragma unroll
      for (int k = 0; k < kQuad; ++k) v.x[k] = x[j + k];
      store_vec<kQuad>(quad(i, j / kQuad), v);
    }
  }

  __device__ __forceinline__ void get(int i, float* x) const {
#pragma unroll
    for (int j = 0; j < kN; j += kQuad) {
      const Vec<float, kQuad> v = load_vec<kQuad>(quad(i, j / kQuad));
#pragma unroll
      for (int k = 0; k < kQuad; ++k) x[j + k] = v.x[k];
    }
  }
};

// A lane's first elements of the head; the rest it reads when it comes to them.
template <int kN, int kLanes, typename T>
__device__ __forceinline__ Vec<T, kN> load_first(const Head<T>& head) {
  const int i = threadIdx.x % kLanes * kN;
  return i < head.size ? load_vec<kN>(head.x + i) : Vec<T, kN>{};
}

// Elements i .. i + kN of the head, read as v, with their bias.
template <int kN, typename T>
__device__ __forceinline__ void add_bias(const Head<T>& head, const Vec<T, kN>& v, int i,
                                         float* x) {
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

// Of elements i .. i + kN, from the position's row of the table; nothing past rotary_dim. A chunk
// never straddles a half: the launcher sees to it.
template <int kN>
__device__ __forceinline__ Angles<kN> load_angles(const RopeTable& rope, const float* cos_sin,
                                                  int i) {
  if (i >= rope.rotary_dim) return {};
  Angles<kN> angles;
  const int half = rope.rotary_dim / 2;
  if (rope.is_neox) {
    const int column = i >= half ? i - half : i;
    load_floats<kN>(cos_sin + column, angles.cosine);
    load_floats<kN>(cos_sin + half + column, angles.sine);
    return angles;
  }
  constexpr int kPairs = kN == 1 ? 1 : kN / 2;
  load_floats<kPairs>(cos_sin + i / 2, angles.cosine);
  load_floats<kPairs>(cos_sin + half + i / 2, angles.sine);
  return angles;
}

// Turns elements i .. i + kN of the head; scratch holds all of it.
template <int kN>
__device__ __forceinline__ void rotate_neox(const Scratch<kN>& scratch, int half, int i,
                                            const Angles<kN>& angles, float* x) {
  const bool upper = i >= half;
  float partner[kN];
  scratch.get(upper ? i - half : i + half, partner);
#pragma unroll
  for (int j = 0; j < kN; ++j) {
    x[j] = x[j] * angles.cosine[j] + (upper ? partner[j] : -partner[j]) * angles.sine[j];
  }
}

template <int kN>
__device__ __forceinline__ void rotate_interleaved(const Scratch<kN>& scratch, int i,
                                                   const Angles<kN>& angles, float* x) {
  if constexpr (kN == 1) {
    float partner[1];
    scratch.get(i ^ 1, partner);
    x[0] = x[0] * angles.cosine[0] + (i % 2 ? partner[0] : -partner[0]) * angles.sine[0];
  } else {
#pragma unroll
    for (int j = 0; j < kN; j += 2) {
      const float cosine = angles.cosine[j / 2], sine = angles.sine[j / 2], first = x[j];
      x[j] = first * cosine - x[j + 1] * sine;
      x[j + 1] = x[j + 1] * cosine + first * sine;
    }
  }
}

template <int kN>
__device__ __forceinline__ void rotate(const Scratch<kN>& scratch, const RopeTable& rope, int i,
                                       const Angles<kN>& angles, float* x) {
  if (i >= rope.rotary_dim) return;
  if (rope.is_neox) return rotate_neox<kN>(scratch, rope.rotary_dim / 2, i, angles, x);
  rotate_interleaved<kN>(scratch, i, angles, x);
}

// RMSNorm (with a weight) and RoPE by angles_of(i); store(i, x) gets elements i .. i + kN. `floats`
// holds head.size floats of this group; v are the lane's first elements, and all it has where fewer
// than 32 lanes hold a head at once: they stay in registers.
template <int kN, int kLanes, typename T, typename AnglesOf, typename Store>
__device__ __forceinline__ void norm_rope(const Head<T>& head, const Vec<T, kN>& v,
                                          const RopeTable& rope, float* floats, AnglesOf angles_of,
                                          Store store) {
  constexpr int kStep = kLanes * kN;
  constexpr bool kOnce = kLanes < 32;
  const unsigned group = lane_group_mask<kLanes>();
  const int first = threadIdx.x % kLanes * kN;
  const Scratch<kN> scratch{floats, head.size};
  float x[kN];
  float sum = 0.0f;
#pragma unroll 1
  for (int i = first; i < head.size; i += kStep) {
    add_bias<kN>(head, i == first ? v : load_vec<kN>(head.x + i), i, x);
#pragma unroll
    for (int j = 0; j < kN; ++j) sum += x[j] * x[j];
    if constexpr (kOnce) break;
    scratch.put(i, x);
  }
  float inverse = 1.0f;
  if (head.weight != nullptr) {
    const float mean = lane_group_sum<kLanes>(sum, group) / static_cast<float>(head.size);
    inverse = 1.0f / sqrtf(mean + head.eps);
  }
#pragma unroll 1
  for (int i = first; i < head.size; i += kStep) {
    if constexpr (!kOnce) scratch.get(i, x);
    if (head.weight != nullptr) {
      const Vec<T, kN> weight = load_vec<kN>(head.weight + i);
#pragma unroll
      for (int j = 0; j < kN; ++j) x[j] *= inverse * to_float(weight.x[j]);
    }
    scratch.put(i, x);
    if constexpr (kOnce) break;
  }
  __syncwarp(group);
#pragma unroll 1
  for (int i = first; i < head.size; i += kStep) {
    if constexpr (!kOnce) scratch.get(i, x);
    rotate<kN>(scratch, rope, i, angles_of(i), x);
    store(i, x);
    if constexpr (kOnce) break;
  }
}

// V: bias, value_scale, store.
template <int kN, int kLanes, typename T, typename Out>
__device__ __forceinline__ void scale_store(const Head<T>& head, Vec<T, kN> v, float value_scale,
                                            float scale, Out* out) {
  const int first = threadIdx.x % kLanes * kN;
#pragma unroll 1
  for (int i = first; i < head.size; i += kLanes * kN) {
    if (i != first) v = load_vec<kN>(head.x + i);
    float x[kN];
    add_bias<kN>(head, v, i, x);
#pragma unroll
    for (int j = 0; j < kN; ++j) x[j] *= value_scale;
    store_head<kN>(x, scale, out + i);
  }
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
