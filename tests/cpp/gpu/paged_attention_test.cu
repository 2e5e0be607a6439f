// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>

#include "../attention_batch.h"
#include "device_place.h"

namespace dflash::test {
namespace {

template <typename T, typename CacheT = T>
void expect_kernel_equals_oracle(const AttentionShape& shape, double tolerance) {
  SCOPED_TRACE(::testing::Message() << "head_dim " << shape.head_dim << ", splits "
                                    << shape.num_splits << ", portable " << shape.portable);
  auto batch = AttentionBatch<T, CacheT>::random(shape);
  DevicePlace place;
  ASSERT_EQ(launch_paged_attention(batch.params(place), nullptr), cudaSuccess);
  place.copy_back();
  batch.expect_output_near(tolerance);
}

void expect_kernels_equal_oracle(AttentionShape shape) {
  expect_kernel_equals_oracle<float>(shape, 1e-5);
  expect_kernel_equals_oracle<float, Float8E4M3>(shape, 1e-4);
  for (bool portable : {false, true}) {
    shape.portable = portable;
    expect_kernel_equals_oracle<Half>(shape, 4e-3);
    expect_kernel_equals_oracle<BFloat16>(shape, 3e-2);
    expect_kernel_equals_oracle<Half, Float8E4M3>(shape, 2e-2);
    expect_kernel_equals_oracle<BFloat16, Float8E4M3>(shape, 6e-2);
  }
}

TEST(PagedAttentionKernel, SmallTiles) {
  for (int head_dim : {64, 96, 128, 256}) {
    AttentionShape shape;
    shape.query_lens = {1, 4, 2, 0, 3};
    shape.seq_lens = {1, 300, 65, 7, 0};
    shape.head_dim = head_dim;
    expect_kernels_equal_oracle(shape);
  }
}

TEST(PagedAttentionKernel, LargeTiles) {
  for (int head_dim : {64, 96, 128, 256}) {
    AttentionShape shape;
    shape.query_lens = {1, 33, 17, 4};
    shape.seq_lens = {200, 129, 17, 0};
    shape.head_dim = head_dim;
    shape.causal = false;
    shape.has_sinks = true;
    expect_kernels_equal_oracle(shape);
  }
}

TEST(PagedAttentionKernel, WindowsPagesAndRatios) {
  for (int ratio : {3, 5, 7}) {
    AttentionShape shape;
    shape.query_lens = {5, 40};
    shape.seq_lens = {300, 40};
    shape.num_heads = 2 * ratio;
    shape.kv_block_size = ratio == 3 ? 1 : 16;
    shape.window_left = 70;
    shape.window_right = 3;
    shape.causal = ratio == 5;
    expect_kernels_equal_oracle(shape);
  }
}

void expect_unaligned_rows_serve(const AttentionShape& shape) {
  auto batch = AttentionBatch<BFloat16, BFloat16>::random(shape);
  // One element further: rows that no 16-byte copy may touch.
  for (auto* cache : {&batch.query, &batch.key_cache, &batch.value_cache}) {
    cache->insert(cache->begin(), BFloat16{0});
  }
  DevicePlace place;
  PagedAttentionParams p = batch.params(place);
  for (const void** pointer : {&p.query, &p.key_cache, &p.value_cache}) {
    *pointer = static_cast<const BFloat16*>(*pointer) + 1;
  }
  ASSERT_EQ(launch_paged_attention(p, nullptr), cudaSuccess);
  place.copy_back();
  for (auto* cache : {&batch.query, &batch.key_cache, &batch.value_cache}) {
    cache->erase(cache->begin());
  }
  batch.expect_output_near(3e-2);
}

TEST(PagedAttentionKernel, UnalignedCacheRows) {
  for (int query_len : {5, 20}) {
    for (bool portable : {false, true}) {
      AttentionShape shape;
      shape.query_lens = {query_len};
      shape.seq_lens = {100};
      shape.portable = portable;
      expect_unaligned_rows_serve(shape);
    }
  }
}

TEST(PagedAttentionKernel, EveryNumberOfSplits) {
  for (int num_splits : {1, 2, 4, 8}) {
    AttentionShape shape;
    shape.query_lens = {3, 40, 1, 2};
    shape.seq_lens = {700, 40, 65, 0};
    shape.has_sinks = true;
    shape.num_splits = num_splits;
    expect_kernels_equal_oracle(shape);
    shape.query_lens = {3, 1, 4};
    shape.seq_lens = {700, 31, 0};
    expect_kernels_equal_oracle(shape);
  }
}

// Where many keys may come, an H200's clusters are of 16, 8, 5 and 1 CTAs with 8, 16, 40 and 72
// tiles.
TEST(PagedAttentionKernel, ManyKeys) {
  for (int num_kv_heads : {1, 2, 5, 9}) {
    AttentionShape shape;
    shape.query_lens = {1, 2, 1, 1, 3, 1, 1, 2};
    shape.seq_lens = {2300, 3, 1023, 1024, 1089, 0, 300, 65};
    shape.num_kv_heads = num_kv_heads;
    shape.num_heads = 3 * num_kv_heads;
    shape.head_dim = num_kv_heads == 2 ? 64 : 128;
    shape.window_left = num_kv_heads == 5 ? 20000 : -1;
    shape.max_keys = 40000;
    expect_kernel_equals_oracle<BFloat16>(shape, 3e-2);
    expect_kernel_equals_oracle<Half, Float8E4M3>(shape, 2e-2);
  }
}

template <typename T, typename CacheT>
std::vector<T> run(AttentionBatch<T, CacheT>& batch) {
  DevicePlace place;
  EXPECT_EQ(launch_paged_attention(batch.params(place), nullptr), cudaSuccess);
  place.copy_back();
  return batch.output;
}

// What a row gives under a fixed number of splits depends on nothing beside it: neither on later
// rows of its request, nor on other requests, nor on the tile that serves it.
template <typename T, typename CacheT = T>
void expect_rows_alone_equal(const AttentionShape& shape) {
  auto batch = AttentionBatch<T, CacheT>::random(shape);
  const std::vector<T> together = run(batch);
  const size_t row_size = size_t(shape.num_heads) * shape.head_dim;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    for (int row : {0, shape.query_lens[r] / 2, shape.query_lens[r] - 1}) {
      auto alone = batch.alone(r, row);
      const std::vector<T> output = run(alone);
      const auto first = together.begin() + (batch.query_start_loc[r] + row) * row_size;
      EXPECT_EQ(std::memcmp(&*first, output.data(), row_size * sizeof(T)), 0)
          << "request " << r << ", row " << row << ", " << shape.num_splits << " splits";
    }
  }
}

TEST(PagedAttentionKernel, RowsDoNotDependOnTheBatch) {
  for (int head_dim : {64, 96, 128, 256}) {
    for (int num_splits : {1, 4, 8}) {
      AttentionShape shape;
      shape.query_lens = {16, 1, 45, 8};
      shape.seq_lens = {700, 333, 45, 72};
      shape.head_dim = head_dim;
      shape.window_left = head_dim == 96 ? 100 : -1;
      shape.num_splits = num_splits;
      expect_rows_alone_equal<float>(shape);
      for (bool portable : {false, true}) {
        shape.portable = portable;
        expect_rows_alone_equal<Half>(shape);
        expect_rows_alone_equal<BFloat16>(shape);
        expect_rows_alone_equal<BFloat16, Float8E4M3>(shape);
      }
    }
  }
}

}  // namespace
}  // namespace dflash::test
