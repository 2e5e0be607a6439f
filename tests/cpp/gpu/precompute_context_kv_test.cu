// SPDX-License-Identifier: Apache-2.0
// The store kernel alone; its GEMM is torch's and is tested from Python.
#include "kernels/precompute_context_kv.h"

#include <gtest/gtest.h>

#include "device_place.h"
#include "kv_batch.h"

namespace dflash::test {
namespace {

struct Shape {
  int64_t num_rows;
  int num_layers, num_kv_heads, head_dim, rotary_dim;
  bool is_neox = true, with_bias = false, with_norm = true;
};

// Layers alternate between pages of 16 and of 1, NHD and HND, two groups of slots.
template <typename T, typename Cache>
struct ContextBatch {
  Shape s;
  std::vector<T> kv, bias, weight;
  std::vector<float> cos_sin, k_scales, v_scales;
  std::vector<int64_t> positions, slots[2];
  std::vector<CacheBuffer<Cache>> keys, values;

  explicit ContextBatch(const Shape& s) : s(s) {
    UniformValues random(13);
    const int64_t kv_size = int64_t{2} * s.num_layers * s.num_kv_heads * s.head_dim;
    const int64_t num_slots = 16 * (2 + s.num_rows / 16);
    kv = typed<T>(random(s.num_rows * kv_size));
    bias = typed<T>(random(kv_size));
    weight = typed<T>(random(int64_t{s.num_layers} * s.head_dim));
    cos_sin = random(kMaxPositions * s.rotary_dim);
    positions = make_positions(s.num_rows);
    slots[0] = make_slots(s.num_rows, num_slots);
    slots[1] = make_slots(s.num_rows, num_slots - 1);
    for (int l = 0; l < s.num_layers; ++l) {
      k_scales.push_back(0.02f + 0.001f * l);
      v_scales.push_back(0.03f + 0.001f * l);
      keys.emplace_back(num_slots, l % 2 ? 1 : 16, s.num_kv_heads, s.head_dim, l % 2 == 0);
      values.emplace_back(num_slots, l % 2 ? 1 : 16, s.num_kv_heads, s.head_dim, l % 2 == 1);
    }
  }

  template <typename Place>
  PrecomputeContextKvParams params(Place&& place) {
    PrecomputeContextKvParams p{};
    const int64_t* group_slots[2] = {place(slots[0]), place(slots[1])};
    p.kv = place(kv);
    p.kv_bias = s.with_bias ? place(bias) : nullptr;
    p.k_norm_weight = s.with_norm ? place(weight) : nullptr;
    p.positions = place(positions);
    p.k_scales = place(k_scales);
    p.v_scales = place(v_scales);
    p.rope = RopeTable{place(cos_sin), s.rotary_dim, s.rotary_dim, s.is_neox};
    p.num_rows = s.num_rows;
    p.num_layers = s.num_layers;
    p.num_kv_heads = s.num_kv_heads;
    p.head_dim = s.head_dim;
    p.eps = 1e-6f;
    p.value_scale = 0.5f;
    p.dtype = kDType<T>;
    p.cache_dtype = kDType<Cache>;
    for (int l = 0; l < s.num_layers; ++l) {
      p.layers[l] =
          ContextLayer{keys[l].view(place(keys[l].data)), values[l].view(place(values[l].data)),
                       group_slots[l % 2], keys[l].kv_block_size};
    }
    return p;
  }
};

template <typename T, typename Cache>
void expect_kernel_equals_twin(const Shape& shape) {
  const ContextBatch<T, Cache> batch(shape);
  ContextBatch<T, Cache> host = batch, device = batch;
  cpu::precompute_context_kv(host.params([](auto& v) { return v.data(); }));
  DevicePlace place;
  ASSERT_EQ(launch_precompute_context_kv(device.params(place), nullptr), cudaSuccess);
  place.copy_back();
  for (int l = 0; l < shape.num_layers; ++l) {
    expect_near(device.keys[l].data, host.keys[l].data);
    expect_near(device.values[l].data, host.values[l].data);
  }
}

template <typename T>
class PrecomputeContextKvKernel : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(PrecomputeContextKvKernel, Types);

TYPED_TEST(PrecomputeContextKvKernel, EqualsTwin) {
  for (int head_dim : {64, 96, 128, 256}) {
    for (bool is_neox : {true, false}) {
      Shape shape{17, 5, 3, head_dim, head_dim, is_neox};
      expect_kernel_equals_twin<TypeParam, TypeParam>(shape);
      shape.with_bias = true;
      shape.rotary_dim = head_dim / 2;
      expect_kernel_equals_twin<TypeParam, Float8E4M3>(shape);
      shape.with_norm = false;
      shape.num_rows = 129;
      expect_kernel_equals_twin<TypeParam, TypeParam>(shape);
    }
  }
}

// Shapes that cannot move in 16-byte steps, the widest heads, and the most layers of a call.
TYPED_TEST(PrecomputeContextKvKernel, EqualsTwinAtAwkwardShapes) {
  for (bool is_neox : {true, false}) {
    for (const Shape& shape :
         {Shape{1, 1, 1, 2, 2, is_neox, true}, Shape{5, 3, 1, 70, 6, is_neox, true},
          Shape{3, 2, 2, 64, 20, is_neox}, Shape{2, 2, 1, 1024, 1024, is_neox, true},
          Shape{3, kMaxContextLayers, 1, 16, 16, is_neox}}) {
      expect_kernel_equals_twin<TypeParam, TypeParam>(shape);
      expect_kernel_equals_twin<TypeParam, Float8E4M3>(shape);
    }
  }
}

}  // namespace
}  // namespace dflash::test
