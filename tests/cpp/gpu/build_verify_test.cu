// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "../batches.h"
#include "device_place.h"

namespace dflash::test {
namespace {

void expect_kernel_equals_twin(const VerifyBatch& batch) {
  VerifyBatch host = batch, device = batch;
  cpu::build_verify(host.params(HostPlace{}));
  DevicePlace place;
  ASSERT_EQ(launch_build_verify(device.params(place), nullptr), cudaSuccess);
  place.copy_back();
  EXPECT_EQ(host.input_ids, device.input_ids);
  EXPECT_EQ(host.positions, device.positions);
  EXPECT_EQ(host.slot_mapping, device.slot_mapping);
  EXPECT_EQ(host.query_seq_lens, device.query_seq_lens);
  EXPECT_EQ(host.query_start_loc, device.query_start_loc);
}

TEST(BuildVerifyKernel, EqualsTwin) {
  for (int kv_block_size : {1, 16}) {
    for (int num_draft : {0, 7, 15}) {
      expect_kernel_equals_twin(VerifyBatch::random(0, 0, num_draft, kv_block_size));
      expect_kernel_equals_twin(VerifyBatch::random(1, 1, num_draft, kv_block_size));
      expect_kernel_equals_twin(VerifyBatch::random(33, 20, num_draft, kv_block_size));
      expect_kernel_equals_twin(VerifyBatch::random(300, 300, num_draft, kv_block_size));
    }
  }
}

}  // namespace
}  // namespace dflash::test
