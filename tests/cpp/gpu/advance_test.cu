// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "../batches.h"
#include "device_place.h"

namespace dflash::test {
namespace {

// Several steps over the same state, more than the ring holds.
void expect_kernel_equals_twin(const AdvanceBatch& batch) {
  AdvanceBatch host = batch, device = batch;
  DevicePlace place;
  const AdvanceParams on_host = host.params(HostPlace{}), on_device = device.params(place);
  for (int i = 0; i < 4; ++i) {
    cpu::advance(on_host);
    ASSERT_EQ(launch_advance(on_device, nullptr), cudaSuccess);
  }
  place.copy_back();
  EXPECT_EQ(host.seq_lens, device.seq_lens);
  EXPECT_EQ(host.last_sampled, device.last_sampled);
  EXPECT_EQ(host.tokens_left, device.tokens_left);
  EXPECT_EQ(host.finished, device.finished);
  EXPECT_EQ(host.step, device.step);
  EXPECT_EQ(host.output_ring, device.output_ring);
  EXPECT_EQ(host.token_counts, device.token_counts);
}

TEST(AdvanceKernel, EqualsTwin) {
  for (int num_columns : {1, 8, 16}) {
    for (int num_stop_ids : {0, 3}) {
      expect_kernel_equals_twin(AdvanceBatch::random(0, 0, num_columns, num_stop_ids, 0));
      expect_kernel_equals_twin(AdvanceBatch::random(1, 1, num_columns, num_stop_ids, 5));
      expect_kernel_equals_twin(AdvanceBatch::random(33, 20, num_columns, num_stop_ids, 1));
      expect_kernel_equals_twin(AdvanceBatch::random(4096, 4000, num_columns, num_stop_ids, 7));
    }
  }
}

}  // namespace
}  // namespace dflash::test
