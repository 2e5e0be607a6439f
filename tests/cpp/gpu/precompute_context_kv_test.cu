// SPDX-License-Identifier: Apache-2.0
// The store kernel alone, whose GEMM is torch's and tested from Python; and the kernel that has both.
#include "kernels/precompute_context_kv.h"

#include <gtest/gtest.h>

#include "device_place.h"
#include "kernels/linear.h"
#include "kv_batch.h"
#include "late.h"

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

// Rows and projections of a batch; rows without a slot in either group are NaN.
template <typename T>
struct Product {
  int64_t num_rows, num_outputs, size, stride;
  std::vector<T> x, weight;

  Product(const Shape& s, int64_t size, const std::vector<int64_t> (&slots)[2])
      : num_rows(s.num_rows),
        num_outputs(int64_t{2} * s.num_layers * s.num_kv_heads * s.head_dim),
        size(size),
        stride(size + 8) {
    UniformValues random(19);
    std::vector<float> rows = random(num_rows * stride), w = random(num_outputs * size);
    for (int64_t r = 0; r < num_rows; ++r) {
      if (slots[0][r] >= 0 || slots[1][r] >= 0) continue;
      std::fill_n(rows.begin() + r * stride, stride, std::nanf(""));
    }
    for (float& value : w) value /= std::sqrt(static_cast<float>(size));
    x = typed<T>(rows);
    weight = typed<T>(w);
  }
};

// One kernel has the bits of linear and the store kernel where both split K alike: not between 4225
// and 8448 outputs.
template <typename T, typename Cache>
void expect_one_kernel_equals_two(const Shape& shape, int64_t size) {
  const ContextBatch<T, Cache> batch(shape);
  Product<T> product(shape, size, batch.slots);
  ContextBatch<T, Cache> two = batch, one = batch;
  DevicePlace place;
  PrecomputeContextKvParams p = two.params(place), q = one.params(place);
  q.product = {place(product.x), place(product.weight), product.num_rows, product.num_outputs,
               size,             product.stride,        size,             kDType<T>};
  q.kv = nullptr;
  const LinearParams linear{q.product.x,    q.product.weight,      nullptr, const_cast<void*>(p.kv),
                            shape.num_rows, product.num_outputs,   size,    product.stride,
                            size,           product.num_outputs,   kDType<T>};
  ASSERT_EQ(launch_linear(linear, nullptr), cudaSuccess);
  ASSERT_EQ(launch_precompute_context_kv(p, nullptr), cudaSuccess);
  ASSERT_TRUE(can_project_context_kv(q));
  ASSERT_EQ(launch_project_context_kv(q, nullptr), cudaSuccess);
  place.copy_back();
  for (int l = 0; l < shape.num_layers; ++l) {
    EXPECT_EQ(floats(one.keys[l].data), floats(two.keys[l].data)) << "layer " << l;
    EXPECT_EQ(floats(one.values[l].data), floats(two.values[l].data)) << "layer " << l;
    EXPECT_NE(floats(one.keys[l].data), floats(batch.keys[l].data)) << "layer " << l;
  }
}

// Whichever of its inputs the kernel right before writes.
template <typename T>
void expect_late_inputs_are_read(int64_t size) {
  const Shape shape{29, 3, 2, 128, 128};
  const ContextBatch<T, T> batch(shape);
  Product<T> product(shape, size, batch.slots);
  std::vector<std::vector<float>> expected;
  for (int late = 0; late < 4; ++late) {  // the first time nothing is
    ContextBatch<T, T> b = batch, source = batch;
    std::vector<T> rows = product.x;
    DevicePlace place;
    PrecomputeContextKvParams p = b.params(place);
    const T* x = place(product.x);
    p.product = {x,   place(product.weight), product.num_rows, product.num_outputs,
                 size, product.stride,       size,             kDType<T>};
    p.kv = nullptr;
    if (late == 1) write_late(place, x, rows, 0xff);
    if (late == 2) write_late(place, p.positions, source.positions, 0);
    if (late == 3) write_late(place, p.layers[0].slot_mapping, source.slots[0], 0xff);
    ASSERT_EQ(launch_project_context_kv(p, nullptr), cudaSuccess);
    place.copy_back();
    for (int l = 0; l < shape.num_layers; ++l) {
      if (late == 0) {
        expected.push_back(floats(b.keys[l].data));
        expected.push_back(floats(b.values[l].data));
      }
      EXPECT_EQ(floats(b.keys[l].data), expected[2 * l]) << "late: " << late;
      EXPECT_EQ(floats(b.values[l].data), expected[2 * l + 1]) << "late: " << late;
    }
  }
}

template <typename T>
class ProjectContextKvKernel : public ::testing::Test {};
using FewRowTypes = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(ProjectContextKvKernel, FewRowTypes);

TYPED_TEST(ProjectContextKvKernel, EqualsItsTwoKernels) {
  for (int64_t num_rows : {1, 16, 29, 57, 64}) {
    for (int head_dim : {64, 128}) {
      for (int64_t size : {72, 1160}) {  // one split of K, two
        SCOPED_TRACE(::testing::Message() << num_rows << " " << head_dim << " " << size);
        Shape shape{num_rows, 5, 3, head_dim, head_dim};
        expect_one_kernel_equals_two<TypeParam, TypeParam>(shape, size);
        shape.is_neox = false;
        shape.with_bias = true;
        shape.rotary_dim = head_dim / 2;
        expect_one_kernel_equals_two<TypeParam, Float8E4M3>(shape, size);
        shape.with_norm = false;
        shape.is_neox = true;
        shape.num_layers = 1;
        expect_one_kernel_equals_two<TypeParam, TypeParam>(shape, size);
      }
    }
  }
}

// More tiles than SMs: a CTA takes several.
TYPED_TEST(ProjectContextKvKernel, EqualsItsTwoKernelsWhereCtasTakeTurns) {
  expect_one_kernel_equals_two<TypeParam, TypeParam>({40, 24, 6, 64, 64}, 136);
  expect_one_kernel_equals_two<TypeParam, TypeParam>({16, kMaxContextLayers, 3, 128, 128}, 264);
}

TYPED_TEST(ProjectContextKvKernel, ReadsWhatWasWritten) {
  for (int64_t size : {264, 1160}) expect_late_inputs_are_read<TypeParam>(size);
}

TYPED_TEST(ProjectContextKvKernel, RefusesOtherShapes) {
  for (const Shape& shape : {Shape{4, 2, 2, 96, 96}, Shape{4, 2, 2, 64, 20},
                             Shape{65, 2, 2, 64, 64}, Shape{4, 2, 2, 256, 256}}) {
    ContextBatch<TypeParam, TypeParam> batch(shape);
    Product<TypeParam> product(shape, 64, batch.slots);
    DevicePlace place;
    PrecomputeContextKvParams p = batch.params(place);
    p.product = {place(product.x), place(product.weight), product.num_rows, product.num_outputs,
                 64,               product.stride,        64,               kDType<TypeParam>};
    EXPECT_FALSE(can_project_context_kv(p));
    EXPECT_EQ(launch_project_context_kv(p, nullptr), cudaErrorInvalidValue);
  }
}

}  // namespace
}  // namespace dflash::test
