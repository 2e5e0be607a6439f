// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "batches.h"

namespace dflash::test {
namespace {

VerifyBatch run(VerifyBatch batch) {
  batch.allocate_outputs();
  cpu::build_verify(batch.params(HostPlace{}));
  return batch;
}

// One request at position s with 3 drafts, in blocks 1 and 2.
VerifyBatch one_request(int s) {
  VerifyBatch b{};
  b.idx_mapping = {0};
  b.seq_lens = {s};
  b.last_sampled = {1};
  b.draft_tokens = {2, 3, 4};
  b.block_table = {1, 2};
  b.num_draft = 3;
  b.num_columns = 2;
  b.kv_block_size = 10;
  b.max_model_len = 16;
  return b;
}

TEST(BuildVerify, Vector) {
  VerifyBatch batch{};
  batch.idx_mapping = {2, 0, -1};
  batch.seq_lens = {6, 0, 3};
  batch.last_sampled = {70, -5, 99};
  batch.draft_tokens = {71, -1, -5, -5, 11, 12};
  batch.block_table = {5, 6, 7, 0, 8, 9};
  batch.num_draft = 2;
  batch.num_columns = 2;
  batch.kv_block_size = 4;
  batch.max_model_len = 100;
  const VerifyBatch b = run(batch);
  EXPECT_EQ(b.input_ids, (Int64s{99, 11, 12, 70, 71, 0, 0, 0, 0}));
  EXPECT_EQ(b.positions, (Int64s{3, 4, 5, 6, 7, 8, 0, 0, 0}));
  // Request 1 meets the null block, then the end of its table.
  EXPECT_EQ(b.slot_mapping, (Int64s{23, 24, 25, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{6, 9, 0}));
  EXPECT_EQ(b.query_start_loc, (Int32s{0, 3, 6, 9}));
}

TEST(BuildVerify, CrossesMaxModelLen) {
  const VerifyBatch b = run(one_request(14));
  EXPECT_EQ(b.positions, (Int64s{14, 15, 15, 15}));
  EXPECT_EQ(b.slot_mapping, (Int64s{24, 25, -1, -1}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{18}));
}

TEST(BuildVerify, NoRequest) {
  VerifyBatch batch = one_request(0);
  batch.idx_mapping.clear();
  const VerifyBatch b = run(batch);
  EXPECT_EQ(b.query_start_loc, (Int32s{0}));
}

}  // namespace
}  // namespace dflash::test
