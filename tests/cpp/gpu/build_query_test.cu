// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "../batches.h"
#include "device_place.h"

namespace dflash::test {
namespace {

void expect_kernel_equals_twin(const QueryBatch& batch) {
  QueryBatch host = batch, device = batch;
  cpu::build_query(host.params(HostPlace{}));
  DevicePlace place;
  ASSERT_EQ(launch_build_query(device.params(place), nullptr), cudaSuccess);
  place.copy_back();
  EXPECT_EQ(host.context_positions, device.context_positions);
  EXPECT_EQ(host.context_slot_mappings, device.context_slot_mappings);
  EXPECT_EQ(host.query_input_ids, device.query_input_ids);
  EXPECT_EQ(host.query_input_ids_int32, device.query_input_ids_int32);
  EXPECT_EQ(host.query_positions, device.query_positions);
  EXPECT_EQ(host.query_slot_mappings, device.query_slot_mappings);
  EXPECT_EQ(host.query_seq_lens, device.query_seq_lens);
  EXPECT_EQ(host.draft_query_start_loc, device.draft_query_start_loc);
  EXPECT_EQ(host.sample_rows, device.sample_rows);
  EXPECT_EQ(host.sample_positions, device.sample_positions);
  EXPECT_EQ(host.sample_idx_mapping, device.sample_idx_mapping);
}

TEST(BuildQueryKernel, EqualsTwin) {
  for (const Int32s& kv_block_sizes : {Int32s{1}, Int32s{16}, Int32s{16, 1, 5, 2, 3, 4, 6, 8}}) {
    for (bool anchor : {false, true}) {
      expect_kernel_equals_twin(QueryBatch::random(0, 0, 7, kv_block_sizes, anchor, 8, 5));
      expect_kernel_equals_twin(QueryBatch::random(1, 1, 1, kv_block_sizes, anchor, 1, 0));
      expect_kernel_equals_twin(QueryBatch::random(33, 20, 15, kv_block_sizes, anchor, 60, 0));
      expect_kernel_equals_twin(QueryBatch::random(300, 300, 7, kv_block_sizes, anchor, 16, 100));
    }
  }
}

TEST(BuildQueryKernel, PadsPastTheBatchAndWritesInt32) {
  QueryBatch batch = QueryBatch::random(5, 4, 7, {16, 1}, false, 60, 3);
  batch.num_padded = 123;
  batch.ids_are_int32 = true;
  batch.allocate_outputs();
  expect_kernel_equals_twin(batch);
}

}  // namespace
}  // namespace dflash::test
