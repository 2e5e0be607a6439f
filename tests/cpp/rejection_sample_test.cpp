// SPDX-License-Identifier: Apache-2.0
#include "kernels/rejection_sample.h"

#include <gtest/gtest.h>

#include "sampling_cases.h"

namespace dflash {
namespace {

class RejectionSample
    : public ::testing::TestWithParam<std::tuple<RejectionMethod, bool, int, bool>> {};

TEST_P(RejectionSample, EqualsTheOracle) {
  const auto [method, recorded, vocab_size, from_tokens] = GetParam();
  const testing::RejectionCase c(24, 4, vocab_size, 1);
  std::vector<int64_t> tokens(24 * 5, 77);
  std::vector<int32_t> num_sampled(24, 77), num_rejected(24, 77);
  const std::vector<int64_t> target_tokens = c.target_tokens();
  RejectionSampleParams p = c.params(method);
  if (from_tokens) p.target_tokens = target_tokens.data();
  else p.target_logits = c.target_logits.data();
  p.logits_start_loc = c.start_loc.data();
  p.logits_positions = c.positions.data();
  p.idx_mapping = c.idx_mapping.data();
  p.draft_tokens = c.draft_tokens.data();
  p.num_draft_tokens = c.num_draft_tokens.data();
  p.draft_logits = recorded ? c.draft_logits.data() : nullptr;
  p.temperatures = c.temperatures.data();
  p.seeds = c.seeds.data();
  p.tokens_left = c.tokens_left.data();
  p.stop_token_ids = c.stop_token_ids.data();
  p.synthetic_rates = c.rates.data();
  p.sampled_token_ids = tokens.data();
  p.num_sampled = num_sampled.data();
  p.num_rejected = num_rejected.data();
  cpu::rejection_sample(p);

  for (int64_t r = 0; r < c.num_reqs; ++r) {
    std::vector<int64_t> expected = c.expected(r, method, recorded);
    const int num_rows = c.idx_mapping[r] < 0 ? 0 : c.start_loc[r + 1] - c.start_loc[r];
    EXPECT_EQ(num_sampled[r], static_cast<int>(expected.size())) << r;
    EXPECT_EQ(num_rejected[r], num_rows - static_cast<int>(expected.size())) << r;
    expected.resize(5, -1);
    EXPECT_EQ(std::vector<int64_t>(&tokens[r * 5], &tokens[r * 5] + 5), expected) << r;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Methods, RejectionSample,
    ::testing::Combine(::testing::Values(RejectionMethod::kMatch, RejectionMethod::kStandard,
                                         RejectionMethod::kBlock, RejectionMethod::kSynthetic),
                       ::testing::Bool(), ::testing::Values(1, 7, 1023, 1025, 5001),
                       ::testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(
    FromTokens, RejectionSample,
    ::testing::Combine(::testing::Values(RejectionMethod::kMatch, RejectionMethod::kSynthetic),
                       ::testing::Values(false), ::testing::Values(1, 7, 1025),
                       ::testing::Values(true)));

}  // namespace
}  // namespace dflash
