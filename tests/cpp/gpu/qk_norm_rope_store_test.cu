// SPDX-License-Identifier: Apache-2.0
#include "kernels/qk_norm_rope_store.h"

#include <gtest/gtest.h>

#include "device_place.h"
#include "kv_batch.h"

namespace dflash::test {
namespace {

struct Shape {
  int64_t num_rows;
  int num_heads, num_kv_heads, head_dim, rotary_dim;
  int64_t kv_block_size = 16;
  bool is_neox = true, is_hnd = false, with_norm = true;
  int64_t pad = 0;  // of qkv's rows
};

template <typename T, typename Cache>
struct QkvBatch {
  Shape s;
  int64_t stride;
  std::vector<T> qkv, q_weight, k_weight, query;
  std::vector<float> cos_sin, k_scale{0.02f}, v_scale{0.03f};
  std::vector<int64_t> positions, slots;
  CacheBuffer<Cache> keys, values;

  explicit QkvBatch(const Shape& s)
      : s(s),
        stride((s.num_heads + 2 * s.num_kv_heads) * s.head_dim + s.pad),
        keys(num_slots(), s.kv_block_size, s.num_kv_heads, s.head_dim, s.is_hnd),
        values(keys) {
    UniformValues random(11);
    qkv = typed<T>(random(s.num_rows * stride));
    q_weight = typed<T>(random(s.head_dim));
    k_weight = typed<T>(random(s.head_dim));
    query = typed<T>(std::vector<float>(s.num_rows * s.num_heads * s.head_dim, 20));
    cos_sin = random(kMaxPositions * s.rotary_dim);
    positions = make_positions(s.num_rows);
    slots = make_slots(s.num_rows, num_slots());
  }

  int64_t num_slots() const { return s.kv_block_size * (2 + s.num_rows / s.kv_block_size); }

  template <typename Place>
  QkNormRopeStoreParams params(Place&& place) {
    QkNormRopeStoreParams p{};
    p.qkv = place(qkv);
    p.q_norm_weight = s.with_norm ? place(q_weight) : nullptr;
    p.k_norm_weight = s.with_norm ? place(k_weight) : nullptr;
    p.positions = place(positions);
    p.slot_mapping = place(slots);
    p.k_scale = place(k_scale);
    p.v_scale = place(v_scale);
    p.query = place(query);
    p.key_cache = keys.view(place(keys.data));
    p.value_cache = values.view(place(values.data));
    p.rope = RopeTable{place(cos_sin), s.rotary_dim, s.rotary_dim, s.is_neox};
    p.num_rows = s.num_rows;
    p.kv_block_size = s.kv_block_size;
    p.qkv_stride = stride;
    p.query_row_stride = int64_t{s.num_heads} * s.head_dim;
    p.query_head_stride = s.head_dim;
    p.num_heads = s.num_heads;
    p.num_kv_heads = s.num_kv_heads;
    p.head_dim = s.head_dim;
    p.eps = 1e-6f;
    p.value_scale = 0.5f;
    p.dtype = kDType<T>;
    p.cache_dtype = kDType<Cache>;
    return p;
  }
};

template <typename T, typename Cache>
void expect_kernel_equals_twin(const Shape& shape) {
  const QkvBatch<T, Cache> batch(shape);
  QkvBatch<T, Cache> host = batch, device = batch;
  cpu::qk_norm_rope_store(host.params([](auto& v) { return v.data(); }));
  DevicePlace place;
  ASSERT_EQ(launch_qk_norm_rope_store(device.params(place), nullptr), cudaSuccess);
  place.copy_back();
  expect_near(device.query, host.query);
  expect_near(device.keys.data, host.keys.data);
  expect_near(device.values.data, host.values.data);
}

template <typename T>
class QkNormRopeStoreKernel : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(QkNormRopeStoreKernel, Types);

TYPED_TEST(QkNormRopeStoreKernel, EqualsTwin) {
  for (int head_dim : {64, 96, 128, 256}) {
    for (bool is_neox : {true, false}) {
      Shape shape{17, 9, 3, head_dim, head_dim};
      shape.is_neox = is_neox;
      expect_kernel_equals_twin<TypeParam, TypeParam>(shape);
      expect_kernel_equals_twin<TypeParam, Float8E4M3>(shape);
      shape.rotary_dim = head_dim / 2;
      shape.is_hnd = true;
      shape.with_norm = false;
      expect_kernel_equals_twin<TypeParam, TypeParam>(shape);
      shape.kv_block_size = 1;
      shape.num_rows = 129;
      expect_kernel_equals_twin<TypeParam, Float8E4M3>(shape);
    }
  }
}

// Shapes that cannot move in 16-byte steps, and heads wider than a group of lanes.
TYPED_TEST(QkNormRopeStoreKernel, EqualsTwinAtAwkwardShapes) {
  for (bool is_neox : {true, false}) {
    for (Shape shape : {Shape{1, 1, 1, 2, 2}, Shape{5, 3, 1, 70, 6}, Shape{3, 4, 2, 64, 20},
                        Shape{3, 4, 2, 512, 512}, Shape{2, 1, 1, 1024, 1024}}) {
      shape.is_neox = is_neox;
      expect_kernel_equals_twin<TypeParam, TypeParam>(shape);
      shape.pad = 1;
      expect_kernel_equals_twin<TypeParam, Float8E4M3>(shape);
    }
  }
}

}  // namespace
}  // namespace dflash::test
