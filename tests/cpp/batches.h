// SPDX-License-Identifier: Apache-2.0
// Batches of the integer ops in host vectors. params(place) asks `place` for a pointer to each
// vector, so that one batch serves the CPU twin and, copied, the kernel.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/advance.h"
#include "kernels/build_query.h"
#include "kernels/build_verify.h"

namespace dflash::test {

using Int32s = std::vector<int32_t>;
using Int64s = std::vector<int64_t>;

constexpr int kPoison = -77;

struct HostPlace {
  template <typename T>
  T* operator()(std::vector<T>& v) {
    return v.data();
  }
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  // In [low, high).
  int operator()(int low, int high) {
    return low + static_cast<int>(engine_() % static_cast<uint32_t>(high - low));
  }

  template <typename T>
  std::vector<T> values(size_t count, int low, int high) {
    std::vector<T> v(count);
    for (T& x : v) x = (*this)(low, high);
    return v;
  }

  // num_live state rows, the last first, then padding.
  Int32s idx_mapping(int num_reqs, int num_live) {
    Int32s v(num_reqs, -1);
    for (int r = 0; r < num_live; ++r) v[r] = num_reqs - 1 - r;
    return v;
  }

 private:
  std::mt19937 engine_;
};

struct VerifyBatch {
  Int32s idx_mapping, seq_lens;
  Int64s last_sampled, draft_tokens;
  Int32s block_table;
  int num_draft, num_columns, kv_block_size, max_model_len;
  Int64s input_ids, positions, slot_mapping;
  Int32s query_seq_lens, query_start_loc;

  void allocate_outputs() {
    const size_t num_reqs = idx_mapping.size(), num_rows = num_reqs * (num_draft + 1);
    input_ids = positions = slot_mapping = Int64s(num_rows, kPoison);
    query_seq_lens = Int32s(num_reqs, kPoison);
    query_start_loc = Int32s(num_reqs + 1, kPoison);
  }

  static VerifyBatch random(int num_reqs, int num_live, int num_draft, int kv_block_size) {
    constexpr int kMaxModelLen = 100, kColumns = 7;
    Random rng(1);
    VerifyBatch b{rng.idx_mapping(num_reqs, num_live),
                  rng.values<int32_t>(num_reqs, 0, kMaxModelLen),
                  rng.values<int64_t>(num_reqs, 0, 50000),
                  rng.values<int64_t>(num_reqs * num_draft, -1, 50000),
                  rng.values<int32_t>(num_reqs * kColumns, 0, 10),
                  num_draft,
                  kColumns,
                  kv_block_size,
                  kMaxModelLen,
                  {},
                  {},
                  {},
                  {},
                  {}};
    b.allocate_outputs();
    return b;
  }

  template <typename Place>
  BuildVerifyParams params(Place&& place) {
    return BuildVerifyParams{
        place(idx_mapping),
        place(seq_lens),
        place(last_sampled),
        place(draft_tokens),
        num_draft,
        BlockTable{place(block_table), num_columns, num_columns, kv_block_size},
        static_cast<int32_t>(idx_mapping.size()),
        num_draft + 1,
        max_model_len,
        place(input_ids),
        place(positions),
        place(slot_mapping),
        place(query_seq_lens),
        place(query_start_loc)};
  }
};

struct QueryBatch {
  Int64s target_positions;
  Int32s query_start_loc, num_sampled, num_rejected;
  Int64s last_sampled, next_prefill_tokens;
  Int32s idx_mapping;
  std::vector<Int32s> block_tables;
  Int32s kv_block_sizes;
  int num_columns, num_draft, mask_token_id, max_model_len;
  bool sample_from_anchor;
  int num_padded = 0;  // requests of the outputs past the batch
  Int64s context_positions;
  std::vector<Int64s> context_slot_mappings;
  Int64s query_input_ids, query_positions;
  Int32s query_input_ids_int32;  // in their place where ids_are_int32
  bool ids_are_int32 = false;
  std::vector<Int64s> query_slot_mappings;
  Int32s query_seq_lens, draft_query_start_loc;
  Int64s sample_rows, sample_positions;
  Int32s sample_idx_mapping;

  int num_query_per_req() const { return num_draft + (sample_from_anchor ? 0 : 1); }

  void allocate_outputs() {
    const size_t num_reqs = idx_mapping.size() + num_padded;
    const size_t num_rows = num_reqs * num_query_per_req();
    context_positions = Int64s(target_positions.size(), kPoison);
    context_slot_mappings.assign(block_tables.size(), context_positions);
    query_input_ids = query_positions = Int64s(num_rows, kPoison);
    query_input_ids_int32 = Int32s(num_rows, kPoison);
    query_slot_mappings.assign(block_tables.size(), query_positions);
    query_seq_lens = Int32s(num_reqs, kPoison);
    draft_query_start_loc = Int32s(num_reqs + 1, kPoison);
    sample_rows = sample_positions = Int64s(num_reqs * num_draft, kPoison);
    sample_idx_mapping = Int32s(num_reqs * num_draft, kPoison);
  }

  // Ragged chunks, some empty or wholly rejected, and `num_tail` rows past the last offset.
  static QueryBatch random(int num_reqs, int num_live, int num_draft, const Int32s& kv_block_sizes,
                           bool sample_from_anchor, int max_rows, int num_tail) {
    constexpr int kMaxModelLen = 100, kColumns = 7;
    Random rng(2);
    QueryBatch b{};
    b.query_start_loc.push_back(0);
    for (int r = 0; r < num_reqs; ++r) {
      const int rows = rng(0, max_rows + 1), start = rng(0, kMaxModelLen - max_rows);
      for (int i = 0; i < rows; ++i) b.target_positions.push_back(start + i);
      b.query_start_loc.push_back(b.query_start_loc.back() + rows);
      b.num_rejected.push_back(rng(0, rows + 1));
    }
    for (int i = 0; i < num_tail; ++i) b.target_positions.push_back(kPoison);
    b.num_sampled = rng.values<int32_t>(num_reqs, 0, 2);
    b.last_sampled = rng.values<int64_t>(num_reqs, 0, 50000);
    b.next_prefill_tokens = rng.values<int64_t>(num_reqs, 0, 50000);
    b.idx_mapping = rng.idx_mapping(num_reqs, num_live);
    for (size_t g = 0; g < kv_block_sizes.size(); ++g) {
      b.block_tables.push_back(rng.values<int32_t>(num_reqs * kColumns, 0, 10));
    }
    b.kv_block_sizes = kv_block_sizes;
    b.num_columns = kColumns;
    b.num_draft = num_draft;
    b.mask_token_id = 123;
    b.max_model_len = kMaxModelLen;
    b.sample_from_anchor = sample_from_anchor;
    b.allocate_outputs();
    return b;
  }

  template <typename Place>
  BuildQueryParams params(Place&& place) {
    BuildQueryParams p{};
    p.target_positions = place(target_positions);
    p.query_start_loc = place(query_start_loc);
    p.num_sampled = place(num_sampled);
    p.num_rejected = place(num_rejected);
    p.last_sampled = place(last_sampled);
    p.next_prefill_tokens = TokenIds{place(next_prefill_tokens), false};
    p.idx_mapping = place(idx_mapping);
    p.num_context_rows = static_cast<int32_t>(target_positions.size());
    p.num_reqs = static_cast<int32_t>(idx_mapping.size());
    p.num_output_reqs = static_cast<int32_t>(query_seq_lens.size());
    p.num_speculative_tokens = num_draft;
    p.num_query_per_req = num_query_per_req();
    p.mask_token_id = mask_token_id;
    p.max_model_len = max_model_len;
    p.sample_from_anchor = sample_from_anchor;
    p.num_groups = static_cast<int32_t>(block_tables.size());
    for (size_t g = 0; g < block_tables.size(); ++g) {
      p.groups[g] =
          KvGroup{BlockTable{place(block_tables[g]), num_columns, num_columns, kv_block_sizes[g]},
                  place(context_slot_mappings[g]), place(query_slot_mappings[g])};
    }
    p.context_positions = place(context_positions);
    p.query_input_ids = ids_are_int32 ? TokenIds{place(query_input_ids_int32), true}
                                      : TokenIds{place(query_input_ids), false};
    p.query_positions = place(query_positions);
    p.query_seq_lens = place(query_seq_lens);
    p.draft_query_start_loc = place(draft_query_start_loc);
    p.sample_rows = place(sample_rows);
    p.sample_positions = place(sample_positions);
    p.sample_idx_mapping = place(sample_idx_mapping);
    return p;
  }
};

struct AdvanceBatch {
  Int64s sampled_token_ids;
  Int32s num_sampled, idx_mapping;
  Int64s stop_token_ids;
  int num_columns, num_stop_ids, ring_size;
  Int32s seq_lens;
  Int64s last_sampled;
  Int32s tokens_left, finished;
  Int64s step, output_ring;
  Int32s token_counts;  // empty: not counted

  static constexpr int kVocabulary = 6;

  // A vocabulary of 6, so that stop tokens are met.
  static AdvanceBatch random(int num_reqs, int num_live, int num_columns, int num_stop_ids,
                             int64_t step) {
    constexpr int kRing = 3;
    Random rng(3);
    return AdvanceBatch{rng.values<int64_t>(num_reqs * num_columns, 0, 6),
                        rng.values<int32_t>(num_reqs, 0, num_columns + 1),
                        rng.idx_mapping(num_reqs, num_live),
                        rng.values<int64_t>(num_reqs * num_stop_ids, -1, 6),
                        num_columns,
                        num_stop_ids,
                        kRing,
                        rng.values<int32_t>(num_reqs, 0, 1000),
                        rng.values<int64_t>(num_reqs, 0, 6),
                        rng.values<int32_t>(num_reqs, 1, 2 * num_columns + 1),
                        rng.values<int32_t>(num_reqs, 0, 3),
                        {step},
                        Int64s(static_cast<size_t>(kRing) * num_reqs * (3 + num_columns), kPoison),
                        rng.values<int32_t>(num_reqs * kVocabulary, 0, 9)};
  }

  template <typename Place>
  AdvanceParams params(Place&& place) {
    const int64_t row = 3 + num_columns;
    const int64_t num_states = static_cast<int64_t>(seq_lens.size());
    return AdvanceParams{place(sampled_token_ids),
                         num_columns,
                         place(num_sampled),
                         place(idx_mapping),
                         place(stop_token_ids),
                         num_stop_ids,
                         static_cast<int32_t>(idx_mapping.size()),
                         num_columns,
                         num_stop_ids,
                         ring_size,
                         num_states * row,
                         row,
                         place(seq_lens),
                         place(last_sampled),
                         place(tokens_left),
                         place(finished),
                         place(step),
                         place(output_ring),
                         token_counts.empty() ? nullptr : place(token_counts),
                         kVocabulary,
                         kVocabulary};
  }
};

}  // namespace dflash::test
