// SPDX-License-Identifier: Apache-2.0
#include "kernels/lm_head_sample.h"

#include <gtest/gtest.h>

namespace dflash {
namespace {

LmHeadSampleParams head(int64_t num_rows, int64_t vocab_size, int64_t padding = 0) {
  alignas(16) static uint16_t data[8];
  LmHeadSampleParams p{};
  p.head = {data, data, num_rows, vocab_size + padding, 4096, 4096, 4096, DType::kBFloat16};
  p.sample.vocab_size = vocab_size;
  return p;
}

void expect_shape(const LmHeadSampleParams& p, int rows) {
  const gemm::Choice c = choose(p);
  EXPECT_EQ(c.rows, rows) << p.head.num_rows << " rows of " << p.sample.vocab_size;
  EXPECT_EQ(c.warpgroups, rows > 0 ? 3 : 0);
  EXPECT_EQ(c.splits, rows > 0 ? 1 : 0);
  EXPECT_EQ(can_fuse(p), rows > 0);
}

// Qwen3's vocabulary: 12 rounds of pairs of SMs over 256 rows, 24 over 512.
TEST(LmHeadSamplePlan, TakesBlocksOfRowsThatFillTheSms) {
  for (int64_t num_rows : {225, 240, 256, 449, 480, 512}) expect_shape(head(num_rows, 151936), 128);
  for (int64_t num_rows : {0, 129, 224, 257, 448, 513}) expect_shape(head(num_rows, 151936), 0);
  for (const auto& [num_rows, rows] :
       {std::pair<int64_t, int>{1, 16}, {17, 32}, {33, 64}, {128, 128}})
    expect_shape(head(num_rows, 151936), rows);
}

// Llama-3's: 10.1 rounds, 20.2. And vocabularies that few rows stream, but not in pairs of blocks.
TEST(LmHeadSamplePlan, LeavesWhatDoesNotFillTheSms) {
  expect_shape(head(256, 128256), 0);
  expect_shape(head(512, 128256), 128);
  expect_shape(head(128, 8449), 128);
  expect_shape(head(256, 8449), 0);
  expect_shape(head(128, 8448), 0);
}

// 123 tiles are too few for the second round, whatever pads them.
TEST(LmHeadSamplePlan, CountsTheVocabularyNotItsPadding) {
  expect_shape(head(256, 124 * 192), 128);
  expect_shape(head(256, 123 * 192, 192), 0);
  expect_shape(head(256, 124 * 192, 50 * 192), 128);
}

TEST(LmHeadSamplePlan, MakesLogitsThatAreRecorded) {
  for (int64_t num_rows : {128, 256}) {
    LmHeadSampleParams p = head(num_rows, 151936);
    p.sample.draft_logits = &p;
    expect_shape(p, 0);
  }
}

}  // namespace
}  // namespace dflash
