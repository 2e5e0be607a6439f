// SPDX-License-Identifier: Apache-2.0
#include "kernels/sample_draft.h"

#include <gtest/gtest.h>

#include "sampling_cases.h"

namespace dflash {
namespace {

class SampleDraft : public ::testing::TestWithParam<std::tuple<bool, int>> {};

TEST_P(SampleDraft, EqualsTheOracle) {
  const auto [reduced, vocab_size] = GetParam();
  const testing::DraftCase c(9, 3, vocab_size, 1);
  std::vector<int64_t> tokens(9 * 3, 77);
  std::vector<float> record(9 * 3 * c.target_vocab_size, 77.0f);
  SampleDraftParams p = c.params();
  p.logits = c.logits.data();
  p.sample_positions = c.positions.data();
  p.sample_idx_mapping = c.idx_mapping.data();
  p.temperatures = c.temperatures.data();
  p.seeds = c.seeds.data();
  p.d2t = reduced ? c.d2t.data() : nullptr;
  p.draft_tokens = tokens.data();
  p.draft_logits = record.data();
  cpu::sample_draft(p);

  for (int64_t row = 0; row < 9 * 3; ++row) {
    const auto begin = record.begin() + row * c.target_vocab_size;
    const std::vector<float> stored(begin, begin + c.target_vocab_size);
    const bool padded = c.idx_mapping[row] < 0;
    EXPECT_EQ(tokens[row], padded ? 77 : c.expected(row, reduced)) << row;
    EXPECT_EQ(stored,
              padded ? std::vector<float>(stored.size(), 77.0f) : c.expected_record(row, reduced))
        << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, SampleDraft,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(1, 7, 1024, 4097, 5001)));

}  // namespace
}  // namespace dflash
