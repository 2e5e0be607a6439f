// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "attention_batch.h"
#include "kernels/common/divisor.h"

namespace dflash::test {
namespace {

void expect_range(KeyRange actual, int begin, int end) {
  EXPECT_EQ(actual.begin, begin);
  EXPECT_EQ(actual.end, end);
}

TEST(KeyRange, FollowsMaskAndWindow) {
  const KeyMask causal{100, true, -1, -1}, open{100, false, -1, -1};
  expect_range(visible_keys(causal, 20, 4, 0), 0, 17);
  expect_range(visible_keys(causal, 20, 4, 3), 0, 20);
  expect_range(visible_keys(open, 20, 4, 0), 0, 20);
  expect_range(visible_keys({100, true, 5, -1}, 20, 4, 0), 11, 17);
  expect_range(visible_keys({100, false, 5, 2}, 20, 4, 0), 11, 19);
  expect_range(visible_keys({10, false, -1, -1}, 20, 4, 3), 0, 10);
}

TEST(KeyRange, GarbageSeesNothing) {
  const KeyMask causal{100, true, 5, -1};
  for (int seq_len : {0, -1, -2147483647 - 1, 2}) {
    const KeyRange keys = visible_keys(causal, seq_len, 4, 0);
    EXPECT_LE(keys.end, keys.begin) << seq_len;
  }
  const KeyRange keys = visible_keys(causal, 2147483647, 4, 3);
  EXPECT_LE(keys.end, 100);
}

// Every step with a visible key belongs to one split, the one its absolute position names.
TEST(KeyRange, StepsAreDealtOnce) {
  for (const KeyRange range : {KeyRange{0, 0}, {9, 3}, {0, 1}, {0, 1000}, {31, 33}, {100, 777}}) {
    for (int num_splits : {1, 2, 3, 4, 5, 8, 16}) {
      std::vector<int> times(64, 0);
      for (int split = 0; split < num_splits; ++split) {
        const Deal deal = deal_steps(range, 32, num_splits, split);
        for (int i = 0; i < deal.count; ++i) {
          const int step = deal.first + i * num_splits;
          EXPECT_EQ(step % num_splits, split);
          ++times[step];
        }
      }
      for (int step = 0; step < 64; ++step) {
        const bool visible = range.begin < range.end && step * 32 < range.end &&
                             (step + 1) * 32 > range.begin;
        EXPECT_EQ(times[step], visible ? 1 : 0) << step << " of " << num_splits;
      }
    }
  }
}

TEST(Divisor, IsExact) {
  for (const int d : {1, 2, 3, 5, 7, 8, 9, 16, 31, 1000, 4096, 65537, 1 << 30, 2147483647}) {
    const Divisor divisor(d);
    for (int n : {0, 1, 2, 7, 8, 999, 65536, d - 1, d, 1 << 30, 2147483646, 2147483647}) {
      EXPECT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
      EXPECT_EQ(divisor.remainder(n), n % d) << n << " % " << d;
    }
  }
}

TEST(PagedAttentionSplits, ArePowersOfTwo) {
  for (int num_splits : {0, 1, 2, 4, 8}) {
    EXPECT_TRUE(attention::splits_are_valid(num_splits)) << num_splits;
  }
  for (int num_splits : {-1, 3, 12, 16, 32}) {
    EXPECT_FALSE(attention::splits_are_valid(num_splits)) << num_splits;
  }
}

template <typename T, typename CacheT = T>
void expect_twin_equals_oracle(const AttentionShape& shape, double tolerance) {
  auto batch = AttentionBatch<T, CacheT>::random(shape);
  cpu::paged_attention(batch.params(HostPlace{}));
  batch.expect_output_near(tolerance);
}

TEST(PagedAttention, RaggedRows) {
  for (bool causal : {true, false}) {
    AttentionShape shape;
    shape.query_lens = {1, 2, 17, 33, 0, 4};
    shape.seq_lens = {1, 170, 17, 65, 9, 0};
    shape.causal = causal;
    expect_twin_equals_oracle<float>(shape, 1e-5);
    expect_twin_equals_oracle<Half>(shape, 4e-3);
    expect_twin_equals_oracle<BFloat16>(shape, 2e-2);
    expect_twin_equals_oracle<float, Float8E4M3>(shape, 1e-4);
  }
}

TEST(PagedAttention, WindowsSinksAndRatios) {
  for (int ratio : {1, 3, 8}) {
    AttentionShape shape;
    shape.query_lens = {5, 40};
    shape.seq_lens = {300, 40};
    shape.num_heads = 2 * ratio;
    shape.kv_block_size = 1;
    shape.window_left = 20;
    shape.window_right = 3;
    shape.causal = false;
    shape.has_sinks = true;
    expect_twin_equals_oracle<float>(shape, 1e-5);
  }
}

TEST(PagedAttention, NothingToDo) {
  AttentionShape shape;
  shape.query_lens = {0, 0};
  shape.seq_lens = {0, 0};
  expect_twin_equals_oracle<float>(shape, 0.0);
}

}  // namespace
}  // namespace dflash::test
