// SPDX-License-Identifier: Apache-2.0
#include "kernels/qk_norm_rope_store.h"

#include <gtest/gtest.h>

#include "typed.h"

namespace dflash {
namespace {

using test::floats;
using test::kDType;
using test::typed;
using Floats = std::vector<float>;

// Two rows, two q heads and one K/V head of 4, blocks of 2 tokens. Position 0 does not rotate,
// position 1 turns by 90 degrees: every value is exact.
template <typename T, typename Cache = T>
struct Case {
  std::vector<T> qkv = typed<T>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,  //
                                 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16});
  Floats cos_sin = {1, 1, 0, 0, 0, 0, 1, 1};
  std::vector<int64_t> positions = {0, 1};
  std::vector<int64_t> slots = {3, 4};
  std::vector<T> query = std::vector<T>(16);
  std::vector<Cache> keys = typed<Cache>(Floats(24, 80));
  std::vector<Cache> values = typed<Cache>(Floats(24, 80));
  QkNormRopeStoreParams p{};

  Case() {
    p.qkv = qkv.data();
    p.positions = positions.data();
    p.slot_mapping = slots.data();
    p.query = query.data();
    p.key_cache = KvCache{keys.data(), 8, 4, 4};
    p.value_cache = KvCache{values.data(), 8, 4, 4};
    p.rope = RopeTable{cos_sin.data(), 4, 4, true};
    p.num_rows = 2;
    p.kv_block_size = 2;
    p.qkv_stride = 16;
    p.query_row_stride = 8;
    p.query_head_stride = 4;
    p.num_heads = 2;
    p.num_kv_heads = 1;
    p.head_dim = 4;
    p.value_scale = 1.0f;
    p.dtype = kDType<T>;
    p.cache_dtype = kDType<Cache>;
  }
};

Floats slot_of(const Floats& cache, int64_t slot) {
  return Floats(cache.begin() + slot * 4, cache.begin() + slot * 4 + 4);
}

template <typename T>
class QkNormRopeStore : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(QkNormRopeStore, Types);

TYPED_TEST(QkNormRopeStore, RotatesHalves) {
  Case<TypeParam> c;
  cpu::qk_norm_rope_store(c.p);
  EXPECT_EQ(floats(c.query), (Floats{1, 2, 3, 4, 5, 6, 7, 8, -3, -4, 1, 2, -7, -8, 5, 6}));
  EXPECT_EQ(slot_of(floats(c.keys), 3), (Floats{9, 10, 11, 12}));
  EXPECT_EQ(slot_of(floats(c.keys), 4), (Floats{-11, -12, 9, 10}));
  EXPECT_EQ(slot_of(floats(c.values), 3), (Floats{13, 14, 15, 16}));
  EXPECT_EQ(slot_of(floats(c.values), 4), (Floats{13, 14, 15, 16}));
}

TYPED_TEST(QkNormRopeStore, RotatesNeighbours) {
  Case<TypeParam> c;
  c.p.rope.is_neox = false;
  cpu::qk_norm_rope_store(c.p);
  EXPECT_EQ(floats(c.query), (Floats{1, 2, 3, 4, 5, 6, 7, 8, -2, 1, -4, 3, -6, 5, -8, 7}));
  EXPECT_EQ(slot_of(floats(c.keys), 4), (Floats{-10, 9, -12, 11}));
}

TYPED_TEST(QkNormRopeStore, LeavesWhatLiesPastRotaryDim) {
  Case<TypeParam> c;
  c.cos_sin = {1, 0, 0, 1};
  c.p.rope = RopeTable{c.cos_sin.data(), 2, 2, true};
  cpu::qk_norm_rope_store(c.p);
  EXPECT_EQ(slot_of(floats(c.keys), 4), (Floats{-10, 9, 11, 12}));
}

TYPED_TEST(QkNormRopeStore, SkipsTheStoreOfSlotMinusOneOnly) {
  Case<TypeParam> c;
  c.slots = {-1, 5};
  c.p.slot_mapping = c.slots.data();
  cpu::qk_norm_rope_store(c.p);
  EXPECT_EQ(floats(c.query)[0], 1);
  for (const Floats& cache : {floats(c.keys), floats(c.values)}) {
    for (int64_t slot = 0; slot < 5; ++slot) EXPECT_EQ(slot_of(cache, slot), Floats(4, 80)) << slot;
    EXPECT_NE(slot_of(cache, 5), Floats(4, 80));
  }
}

TYPED_TEST(QkNormRopeStore, NormsQAndKButNotV) {
  Case<TypeParam> c;
  c.qkv = typed<TypeParam>({3, -3, 3, -3, 3, 3, 3, 3, -3, 3, 3, 3, 5, 6, 7, 8});
  auto q_weight = typed<TypeParam>({1, 2, 4, 8});
  auto k_weight = typed<TypeParam>({4, 4, 4, 4});
  c.p.qkv = c.qkv.data();
  c.p.num_rows = 1;
  c.p.q_norm_weight = q_weight.data();
  c.p.k_norm_weight = k_weight.data();
  c.p.eps = 7.0f;  // mean square 9: the root is 4
  c.p.value_scale = 0.5f;
  cpu::qk_norm_rope_store(c.p);
  EXPECT_EQ(Floats(floats(c.query)),
            (Floats{.75, -1.5, 3, -6, .75, 1.5, 3, 6, 0, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(slot_of(floats(c.keys), 3), (Floats{-3, 3, 3, 3}));
  EXPECT_EQ(slot_of(floats(c.values), 3), (Floats{2.5, 3, 3.5, 4}));
}

TYPED_TEST(QkNormRopeStore, AnFp8CacheHoldsTheQuotient) {
  Case<TypeParam, Float8E4M3> c;
  const float k_scale = 0.5f, v_scale = 1.0f / 64;
  c.p.k_scale = &k_scale;
  c.p.v_scale = &v_scale;
  cpu::qk_norm_rope_store(c.p);
  EXPECT_EQ(slot_of(floats(c.keys), 4), (Floats{-22, -24, 18, 20}));
  EXPECT_EQ(slot_of(floats(c.values), 4), Floats(4, 448));  // saturates
}

}  // namespace
}  // namespace dflash
