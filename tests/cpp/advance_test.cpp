// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "batches.h"

namespace dflash::test {
namespace {

// Requests in state rows 1 and 0, and a padded one; stop token 2 in state row 1 only.
AdvanceBatch batch_of_three() {
  AdvanceBatch b{};
  b.sampled_token_ids = {7, 2, -1, 2, 8, 9, 5, 5, 5};
  b.num_sampled = {2, 3, 3};
  b.idx_mapping = {1, 0, -1};
  b.stop_token_ids = {-1, 2};
  b.num_columns = 3;
  b.num_stop_ids = 1;
  b.ring_size = 2;
  b.seq_lens = {10, 20};
  b.last_sampled = {0, 0};
  b.tokens_left = {3, 2};
  b.finished = {0, 0};
  b.step = {5};
  b.output_ring = Int64s(2 * 2 * 6, kPoison);
  return b;
}

TEST(Advance, CommitsAndFinishes) {
  AdvanceBatch b = batch_of_three();
  cpu::advance(b.params(HostPlace{}));
  EXPECT_EQ(b.seq_lens, (Int32s{13, 22}));
  EXPECT_EQ(b.last_sampled, (Int64s{9, 2}));
  EXPECT_EQ(b.tokens_left, (Int32s{0, 0}));
  EXPECT_EQ(b.finished, (Int32s{2, 1}));  // at its last token too, a stop token wins
  EXPECT_EQ(b.step, (Int64s{6}));
  Int64s ring(12, kPoison);
  ring.insert(ring.end(), {5, 3, 2, 2, 8, 9, 5, 2, 1, 7, 2, -1});
  EXPECT_EQ(b.output_ring, ring);
}

// Bit 31, the prompt's, stays; tokens past the vocabulary of the counts are not counted.
TEST(Advance, CountsCommittedTokens) {
  constexpr int32_t kInPrompt = INT32_MIN;
  AdvanceBatch b = batch_of_three();
  b.sampled_token_ids = {1, 2, 4, 2, 6, 2, 5, 5, 5};
  b.token_counts = {0, 0, kInPrompt, 0, 0, 0, 0, 0, 7, 0, 1, 0};
  cpu::advance(b.params(HostPlace{}));
  EXPECT_EQ(b.token_counts, (Int32s{0, 0, kInPrompt + 2, 0, 0, 0, 0, 1, 8, 0, 1, 0}));
}

TEST(Advance, NothingSampledLeavesTheState) {
  AdvanceBatch b = batch_of_three();
  b.num_sampled = {0, 0, 0};
  b.finished = {0, 2};
  cpu::advance(b.params(HostPlace{}));
  EXPECT_EQ(b.seq_lens, (Int32s{10, 20}));
  EXPECT_EQ(b.tokens_left, (Int32s{3, 2}));
  EXPECT_EQ(b.finished, (Int32s{0, 2}));
  EXPECT_EQ(Int64s(b.output_ring.end() - 6, b.output_ring.end()), (Int64s{5, 0, 2, -1, -1, -1}));
}

}  // namespace
}  // namespace dflash::test
