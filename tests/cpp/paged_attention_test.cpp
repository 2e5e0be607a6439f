// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "attention_batch.h"

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

TEST(KeyRange, SplitsCoverEveryKeyOnce) {
  for (int num_keys : {0, 1, 63, 64, 65, 1000, 8191}) {
    for (int max_splits : {1, 2, 7, 128}) {
      const KeySplits splits = split_keys({5, 5 + num_keys}, max_splits, 64);
      EXPECT_LE(splits.num_splits, max_splits);
      EXPECT_EQ(splits.keys_per_split % 64, 0);
      EXPECT_GE(splits.num_splits * splits.keys_per_split, num_keys);
      if (num_keys > 0) EXPECT_LT((splits.num_splits - 1) * splits.keys_per_split, num_keys);
    }
  }
}

// A size that a caller asked for with his limits serves every batch within them, on every device.
TEST(PagedAttentionWorkspace, BoundsEveryBatch) {
  for (int num_sms : {1, 132, 148, 160, 400}) {
    for (int num_rows : {1, 7, 64, 500, 4096}) {
      for (int max_query_len : {1, 4, 16, 4096}) {
        for (int max_seq_len : {1, 64, 65, 4096, 1 << 20}) {
          const int64_t given =
              attention::workspace_size(num_rows, 32, 8, 128, max_query_len, max_seq_len);
          const int tile_m = attention::tile_m(32, 8, max_query_len);
          for (int num_reqs : {1, num_rows}) {
            const int64_t splits =
                attention::num_splits(num_rows, num_reqs, 32, 8, tile_m, max_seq_len, num_sms);
            const int64_t needed = splits == 1 ? 0 : splits * num_rows * 32 * (128 + 2) * 4;
            EXPECT_LE(needed, given) << num_sms << " " << num_rows << " " << max_query_len;
          }
        }
      }
    }
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
