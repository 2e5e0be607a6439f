// SPDX-License-Identifier: Apache-2.0
#include "kernels/precompute_context_kv.h"

#include <gtest/gtest.h>

#include "typed.h"

namespace dflash {
namespace {

using test::floats;
using test::kDType;
using test::typed;
using Floats = std::vector<float>;

// Two rows, two layers, one K/V head of 2. Layer 0 has blocks of 2 tokens in group 0, layer 1 pages
// of 1 in group 1. Position 1 turns by 90 degrees.
template <typename T>
struct Case {
  std::vector<T> kv = typed<T>({1, 2, 3, 4, 5, 6, 7, 8, 10, 20, 30, 40, 50, 60, 70, 80});
  Floats cos_sin = {1, 0, 0, 1};
  std::vector<int64_t> positions = {0, 1};
  std::vector<std::vector<int64_t>> slots = {{2, 3}, {-1, 1}};
  std::vector<std::vector<T>> keys{2, typed<T>(Floats(8, -5))};
  std::vector<std::vector<T>> values{2, typed<T>(Floats(8, -5))};
  PrecomputeContextKvParams p{};

  Case() {
    p.kv = kv.data();
    p.positions = positions.data();
    p.rope = RopeTable{cos_sin.data(), 2, 2, true};
    p.num_rows = 2;
    p.num_layers = 2;
    p.num_kv_heads = 1;
    p.head_dim = 2;
    p.value_scale = 1.0f;
    p.dtype = kDType<T>;
    p.cache_dtype = kDType<T>;
    for (int l = 0; l < 2; ++l) {
      const int64_t kv_block_size = 2 - l;
      p.layers[l] = ContextLayer{KvCache{keys[l].data(), 2 * kv_block_size, 2, 2},
                                 KvCache{values[l].data(), 2 * kv_block_size, 2, 2},
                                 slots[l].data(), kv_block_size};
    }
  }
};

template <typename T>
class PrecomputeContextKv : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(PrecomputeContextKv, Types);

TYPED_TEST(PrecomputeContextKv, EveryLayerByItsOwnGroupAndBlockSize) {
  Case<TypeParam> c;
  cpu::precompute_context_kv(c.p);
  EXPECT_EQ(floats(c.keys[0]), (Floats{-5, -5, -5, -5, 1, 2, -20, 10}));
  EXPECT_EQ(floats(c.values[0]), (Floats{-5, -5, -5, -5, 3, 4, 30, 40}));
  EXPECT_EQ(floats(c.keys[1]), (Floats{-5, -5, -60, 50, -5, -5, -5, -5}));
  EXPECT_EQ(floats(c.values[1]), (Floats{-5, -5, 70, 80, -5, -5, -5, -5}));
}

TYPED_TEST(PrecomputeContextKv, BiasThenNormOfEachLayer) {
  Case<TypeParam> c;
  auto bias = typed<TypeParam>({2, 1, 1, 0, -53, -57, -70, 0});
  auto weight = typed<TypeParam>({4, 8, 2, 4});
  c.p.kv_bias = bias.data();
  c.p.k_norm_weight = weight.data();
  c.p.eps = 7.0f;  // mean square 9: the root is 4
  c.p.value_scale = 2.0f;
  cpu::precompute_context_kv(c.p);
  EXPECT_EQ(floats(c.keys[0])[4], 3);
  EXPECT_EQ(floats(c.keys[0])[5], 6);
  EXPECT_EQ(floats(c.values[0])[4], 8);
  EXPECT_EQ(floats(c.values[0])[5], 8);
  EXPECT_EQ(floats(c.keys[1])[2], -3);  // (-3, 3) normed to (-1.5, 3), turned
  EXPECT_EQ(floats(c.keys[1])[3], -1.5);
  EXPECT_EQ(floats(c.values[1])[2], 0);
  EXPECT_EQ(floats(c.values[1])[3], 160);
}

TYPED_TEST(PrecomputeContextKv, ScalesOfEachLayerInAnFp8Cache) {
  Case<TypeParam> c;
  const Floats k_scales = {0.5f, 2.0f}, v_scales = {0.25f, 4.0f};
  std::vector<std::vector<Float8E4M3>> keys{2, std::vector<Float8E4M3>(8)}, values = keys;
  c.p.cache_dtype = DType::kFloat8E4M3;
  c.p.k_scales = k_scales.data();
  c.p.v_scales = v_scales.data();
  for (int l = 0; l < 2; ++l) {
    c.p.layers[l].key_cache.data = keys[l].data();
    c.p.layers[l].value_cache.data = values[l].data();
  }
  cpu::precompute_context_kv(c.p);
  EXPECT_EQ(floats(keys[0]), (Floats{0, 0, 0, 0, 2, 4, -40, 20}));
  EXPECT_EQ(floats(values[0]), (Floats{0, 0, 0, 0, 12, 16, 120, 160}));
  EXPECT_EQ(floats(keys[1]), (Floats{0, 0, -30, 24, 0, 0, 0, 0}));  // 25 is a tie
  EXPECT_EQ(floats(values[1]), (Floats{0, 0, 18, 20, 0, 0, 0, 0}));
}

}  // namespace
}  // namespace dflash
