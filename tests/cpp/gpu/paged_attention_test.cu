// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "../attention_batch.h"
#include "device_place.h"

namespace dflash::test {
namespace {

template <typename T, typename CacheT = T>
void expect_kernel_equals_oracle(const AttentionShape& shape, double tolerance) {
  auto batch = AttentionBatch<T, CacheT>::random(shape);
  DevicePlace place;
  ASSERT_EQ(launch_paged_attention(batch.params(place), nullptr), cudaSuccess);
  place.copy_back();
  batch.expect_output_near(tolerance);
}

void expect_kernels_equal_oracle(const AttentionShape& shape) {
  expect_kernel_equals_oracle<float>(shape, 1e-5);
  expect_kernel_equals_oracle<Half>(shape, 4e-3);
  expect_kernel_equals_oracle<BFloat16>(shape, 3e-2);
  expect_kernel_equals_oracle<float, Float8E4M3>(shape, 1e-4);
  expect_kernel_equals_oracle<Half, Float8E4M3>(shape, 2e-2);
  expect_kernel_equals_oracle<BFloat16, Float8E4M3>(shape, 6e-2);
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

TEST(PagedAttentionKernel, UnalignedCacheRows) {
  AttentionShape shape;
  shape.query_lens = {5};
  shape.seq_lens = {100};
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

}  // namespace
}  // namespace dflash::test
