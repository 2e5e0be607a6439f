// SPDX-License-Identifier: Apache-2.0
#include "kernels/rejection_sample.h"

#include <gtest/gtest.h>

#include "../sampling_cases.h"
#include "device_array.h"
#include "late.h"

namespace dflash {
namespace {

using testing::DeviceArray;

class RejectionSampleKernel
    : public ::testing::TestWithParam<std::tuple<RejectionMethod, bool, int, bool>> {};

TEST_P(RejectionSampleKernel, EqualsTheOracle) {
  const auto [method, recorded, vocab_size, from_tokens] = GetParam();
  const testing::RejectionCase c(24, 4, vocab_size, 1);
  const DeviceArray<float> target_logits(c.target_logits), draft_logits(c.draft_logits),
      temperatures(c.temperatures), rates(c.rates);
  const DeviceArray<int32_t> start_loc(c.start_loc), idx_mapping(c.idx_mapping),
      num_draft_tokens(c.num_draft_tokens), tokens_left(c.tokens_left);
  const DeviceArray<int64_t> positions(c.positions), draft_tokens(c.draft_tokens), seeds(c.seeds),
      stop_token_ids(c.stop_token_ids), target_tokens(c.target_tokens());
  const DeviceArray<int64_t> tokens(std::vector<int64_t>(24 * 5, 77));
  const DeviceArray<int32_t> num_sampled(std::vector<int32_t>(24, 77)),
      num_rejected(std::vector<int32_t>(24, 77));
  RejectionSampleParams p = c.params(method);
  if (from_tokens) p.target_tokens = target_tokens.data();
  else p.target_logits = target_logits.data();
  p.logits_start_loc = start_loc.data();
  p.logits_positions = positions.data();
  p.idx_mapping = idx_mapping.data();
  p.draft_tokens = draft_tokens.data();
  p.num_draft_tokens = num_draft_tokens.data();
  p.draft_logits = recorded ? draft_logits.data() : nullptr;
  p.temperatures = temperatures.data();
  p.seeds = seeds.data();
  p.tokens_left = tokens_left.data();
  p.stop_token_ids = stop_token_ids.data();
  p.synthetic_rates = rates.data();
  p.sampled_token_ids = tokens.data();
  p.num_sampled = num_sampled.data();
  p.num_rejected = num_rejected.data();
  const DeviceArray<uint8_t> scratch(
      std::vector<uint8_t>(static_cast<size_t>(rejection_sample_scratch_size(p)), 0xff));
  p.scratch = scratch.data();
  test::DevicePlace place;
  std::vector<int64_t> late = c.target_tokens();
  if (from_tokens) test::write_late(place, p.target_tokens, late, 0xff);
  ASSERT_EQ(launch_rejection_sample(p, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  const std::vector<int64_t> actual = tokens.to_host();
  const std::vector<int32_t> sampled = num_sampled.to_host(), rejected = num_rejected.to_host();
  for (int64_t r = 0; r < c.num_reqs; ++r) {
    std::vector<int64_t> expected = c.expected(r, method, recorded);
    const int num_rows = c.idx_mapping[r] < 0 ? 0 : c.start_loc[r + 1] - c.start_loc[r];
    EXPECT_EQ(sampled[r], static_cast<int>(expected.size())) << r;
    EXPECT_EQ(rejected[r], num_rows - static_cast<int>(expected.size())) << r;
    expected.resize(5, -1);
    EXPECT_EQ(std::vector<int64_t>(&actual[r * 5], &actual[r * 5] + 5), expected) << r;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Methods, RejectionSampleKernel,
    ::testing::Combine(::testing::Values(RejectionMethod::kMatch, RejectionMethod::kStandard,
                                         RejectionMethod::kBlock, RejectionMethod::kSynthetic),
                       ::testing::Bool(), ::testing::Values(1, 7, 1025, 4096, 9001),
                       ::testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(
    FromTokens, RejectionSampleKernel,
    ::testing::Combine(::testing::Values(RejectionMethod::kMatch, RejectionMethod::kSynthetic),
                       ::testing::Values(false), ::testing::Values(1, 7, 1025),
                       ::testing::Values(true)));

}  // namespace
}  // namespace dflash
