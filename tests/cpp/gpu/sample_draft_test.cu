// SPDX-License-Identifier: Apache-2.0
#include "kernels/sample_draft.h"

#include <gtest/gtest.h>

#include "../sampling_cases.h"
#include "device_array.h"

namespace dflash {
namespace {

using testing::DeviceArray;

class SampleDraftKernel : public ::testing::TestWithParam<std::tuple<bool, int>> {};

TEST_P(SampleDraftKernel, EqualsTheOracle) {
  const auto [reduced, vocab_size] = GetParam();
  const testing::DraftCase c(9, 3, vocab_size, 1);
  const DeviceArray<float> logits(c.logits), temperatures(c.temperatures);
  const DeviceArray<int64_t> positions(c.positions), seeds(c.seeds), d2t(c.d2t);
  const DeviceArray<int32_t> idx_mapping(c.idx_mapping);
  const DeviceArray<int64_t> tokens(std::vector<int64_t>(9 * 3, 77));
  const DeviceArray<float> record(std::vector<float>(9 * 3 * c.target_vocab_size, 77.0f));
  SampleDraftParams p = c.params();
  p.logits = logits.data();
  p.sample_positions = positions.data();
  p.sample_idx_mapping = idx_mapping.data();
  p.temperatures = temperatures.data();
  p.seeds = seeds.data();
  p.d2t = reduced ? d2t.data() : nullptr;
  p.draft_tokens = tokens.data();
  p.draft_logits = record.data();
  const DeviceArray<uint8_t> scratch(
      std::vector<uint8_t>(static_cast<size_t>(sample_draft_scratch_size(p)), 0xff));
  p.scratch = scratch.data();
  ASSERT_EQ(launch_sample_draft(p, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  const std::vector<int64_t> actual = tokens.to_host();
  const std::vector<float> recorded = record.to_host();
  for (int64_t row = 0; row < 9 * 3; ++row) {
    const auto begin = recorded.begin() + row * c.target_vocab_size;
    const std::vector<float> stored(begin, begin + c.target_vocab_size);
    const bool padded = c.idx_mapping[row] < 0;
    EXPECT_EQ(actual[row], padded ? 77 : c.expected(row, reduced)) << row;
    EXPECT_EQ(stored,
              padded ? std::vector<float>(stored.size(), 77.0f) : c.expected_record(row, reduced))
        << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, SampleDraftKernel,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(1, 7, 4096, 4097, 9001)));

}  // namespace
}  // namespace dflash
