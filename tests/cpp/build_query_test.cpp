// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "batches.h"

namespace dflash::test {
namespace {

// One request in state row 1 of 2, bonus 99, slots of position p at 20 + p for p in 10..19.
QueryBatch one_request(const Int64s& positions, int num_rejected) {
  QueryBatch b{};
  b.target_positions = positions;
  b.query_start_loc = {0, static_cast<int32_t>(positions.size())};
  b.num_sampled = {1};
  b.num_rejected = {num_rejected};
  b.last_sampled = {-7, 99};
  b.next_prefill_tokens = {-7, 55};
  b.idx_mapping = {1};
  b.block_tables = {{9, 3}};
  b.kv_block_sizes = {10};
  b.num_columns = 2;
  b.num_draft = 2;
  b.mask_token_id = 123;
  b.max_model_len = 100;
  return b;
}

QueryBatch run(QueryBatch batch) {
  batch.allocate_outputs();
  cpu::build_query(batch.params(HostPlace{}));
  return batch;
}

TEST(BuildQuery, Vector) {
  const QueryBatch b = run(one_request({10, 11, 12, 13}, 2));
  EXPECT_EQ(b.context_positions, (Int64s{10, 11, 0, 0}));
  EXPECT_EQ(b.context_slot_mappings[0], (Int64s{30, 31, -1, -1}));
  EXPECT_EQ(b.query_input_ids, (Int64s{99, 123, 123}));
  EXPECT_EQ(b.query_positions, (Int64s{12, 13, 14}));
  EXPECT_EQ(b.query_slot_mappings[0], (Int64s{32, 33, 34}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{15}));
  EXPECT_EQ(b.draft_query_start_loc, (Int32s{0, 3}));
  EXPECT_EQ(b.sample_rows, (Int64s{1, 2}));
  EXPECT_EQ(b.sample_positions, (Int64s{13, 14}));
  EXPECT_EQ(b.sample_idx_mapping, (Int32s{1, 1}));
}

TEST(BuildQuery, SampleFromAnchor) {
  QueryBatch batch = one_request({10, 11, 12, 13}, 2);
  batch.sample_from_anchor = true;
  const QueryBatch b = run(batch);
  EXPECT_EQ(b.query_positions, (Int64s{12, 13}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{14}));
  EXPECT_EQ(b.sample_rows, (Int64s{0, 1}));
  EXPECT_EQ(b.sample_positions, (Int64s{13, 14}));
}

TEST(BuildQuery, NoValidRowReadsNothing) {
  const QueryBatch b = run(one_request({10, 11}, 2));
  EXPECT_EQ(b.context_slot_mappings[0], (Int64s{-1, -1}));
  EXPECT_EQ(b.query_positions, (Int64s{0, 0, 0}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{0}));
  EXPECT_EQ(b.sample_idx_mapping, (Int32s{-1, -1}));
}

TEST(BuildQuery, TailOfTheBucketIsPadding) {
  QueryBatch batch = one_request({10, 11, 12}, 0);
  batch.query_start_loc = {0, 1};
  const QueryBatch b = run(batch);
  EXPECT_EQ(b.context_positions, (Int64s{10, 0, 0}));
  EXPECT_EQ(b.context_slot_mappings[0], (Int64s{30, -1, -1}));
  EXPECT_EQ(b.query_positions, (Int64s{11, 12, 13}));
}

TEST(BuildQuery, OutputsPastTheBatchArePaddedAndIdsMayBeInt32) {
  QueryBatch batch = one_request({10, 11}, 0);
  batch.num_padded = 2;
  batch.ids_are_int32 = true;
  const QueryBatch b = run(batch);
  EXPECT_EQ(b.query_input_ids_int32, (Int32s{99, 123, 123, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(b.query_slot_mappings[0], (Int64s{32, 33, 34, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{15, 0, 0}));
  EXPECT_EQ(b.draft_query_start_loc, (Int32s{0, 3, 6, 9}));
  EXPECT_EQ(b.sample_idx_mapping, (Int32s{1, 1, -1, -1, -1, -1}));
}

TEST(BuildQuery, PromptAsLongAsMaxModelLen) {
  QueryBatch batch = one_request({15}, 0);
  batch.max_model_len = 16;
  const QueryBatch b = run(batch);
  EXPECT_EQ(b.context_slot_mappings[0], (Int64s{35}));
  EXPECT_EQ(b.query_positions, (Int64s{15, 15, 15}));
  EXPECT_EQ(b.query_slot_mappings[0], (Int64s{-1, -1, -1}));
  EXPECT_EQ(b.query_seq_lens, (Int32s{16}));
  EXPECT_EQ(b.sample_positions, (Int64s{17, 18}));
}

}  // namespace
}  // namespace dflash::test
