// SPDX-License-Identifier: Apache-2.0
// A paged_attention call in host vectors, with an oracle in double. Slots that no request sees hold
// NaN, output starts as kUntouched.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "batches.h"
#include "kernels/paged_attention.h"

namespace dflash::test {

constexpr float kUntouched = 5.0f;

struct AttentionShape {
  Int32s query_lens, seq_lens;
  int num_heads = 4, num_kv_heads = 2, head_dim = 64;
  int kv_block_size = 16;
  bool causal = true;
  int window_left = -1, window_right = -1;
  bool has_sinks = false;
  int num_splits = 0;
  bool portable = false;
  int num_spare_rows = 3;  // past query_start_loc's end
  int max_keys = 0;  // of the mask, where there may be more than the block table's
};

template <typename T, typename CacheT>
struct AttentionBatch {
  AttentionShape shape;
  std::vector<T> query, output;
  std::vector<CacheT> key_cache, value_cache;
  Int32s block_table, seq_lens, query_start_loc;
  std::vector<float> sinks, k_scale, v_scale;
  int max_blocks = 0, max_query_len = 0, max_seq_len = 0;

  static AttentionBatch random(const AttentionShape& shape);

  template <typename Place>
  PagedAttentionParams params(Place&& place);

  void expect_output_near(double tolerance) const;

  int num_reqs() const { return static_cast<int>(shape.query_lens.size()); }
  int num_rows() const { return query_start_loc.back() + shape.num_spare_rows; }
  int64_t slot(int r, int key) const {
    const int page = block_table[r * max_blocks + key / shape.kv_block_size];
    return int64_t{page} * shape.kv_block_size + key % shape.kv_block_size;
  }
  std::vector<double> expected_row(int r, int row, int head) const;

  // Row `row` of request r as a call of its own: what follows it in the request is cut off.
  AttentionBatch alone(int r, int row) const;
};

template <typename T>
DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kFloat32;
  if constexpr (std::is_same_v<T, Half>) return DType::kFloat16;
  if constexpr (std::is_same_v<T, BFloat16>) return DType::kBFloat16;
  return DType::kFloat8E4M3;
}

template <typename T, typename CacheT>
AttentionBatch<T, CacheT> AttentionBatch<T, CacheT>::random(const AttentionShape& shape) {
  AttentionBatch b;
  b.shape = shape;
  b.seq_lens = shape.seq_lens;
  Random random(1);
  const auto value = [&random] { return static_cast<float>(random(-1000, 1001)) / 500.0f; };
  b.query_start_loc = {0};
  for (int r = 0; r < b.num_reqs(); ++r) {
    b.query_start_loc.push_back(b.query_start_loc.back() + shape.query_lens[r]);
    b.max_query_len = std::max(b.max_query_len, shape.query_lens[r]);
    b.max_seq_len = std::max(b.max_seq_len, shape.seq_lens[r]);
  }
  b.max_blocks = b.max_seq_len / shape.kv_block_size + 1;
  const int num_blocks = 1 + b.max_blocks * b.num_reqs();
  const int row_size = shape.num_kv_heads * shape.head_dim;
  const CacheT nan = from_float<CacheT>(std::numeric_limits<float>::quiet_NaN());
  b.key_cache.assign(size_t(num_blocks) * shape.kv_block_size * row_size, nan);
  b.value_cache = b.key_cache;
  for (int i = 1; i < num_blocks; ++i) b.block_table.push_back(num_blocks - i);
  for (int r = 0; r < b.num_reqs(); ++r) {
    for (int key = 0; key < shape.seq_lens[r]; ++key) {
      for (int d = 0; d < row_size; ++d) {
        b.key_cache[b.slot(r, key) * row_size + d] = from_float<CacheT>(value());
        b.value_cache[b.slot(r, key) * row_size + d] = from_float<CacheT>(value());
      }
    }
  }
  b.query.resize(size_t(b.num_rows()) * shape.num_heads * shape.head_dim);
  for (T& x : b.query) x = from_float<T>(value());
  b.output.assign(b.query.size(), from_float<T>(kUntouched));
  if (shape.has_sinks) b.sinks.resize(shape.num_heads);
  for (float& x : b.sinks) x = value();
  b.k_scale = {std::is_same_v<CacheT, Float8E4M3> ? 0.5f : 1.0f};
  b.v_scale = {std::is_same_v<CacheT, Float8E4M3> ? 3.0f : 1.0f};
  return b;
}

template <typename T, typename CacheT>
template <typename Place>
PagedAttentionParams AttentionBatch<T, CacheT>::params(Place&& place) {
  PagedAttentionParams p{};
  p.query = place(query);
  p.key_cache = place(key_cache);
  p.value_cache = place(value_cache);
  p.block_table = place(block_table);
  p.seq_lens = place(seq_lens);
  p.query_start_loc = place(query_start_loc);
  p.sinks = shape.has_sinks ? place(sinks) : nullptr;
  p.k_scale = place(k_scale);
  p.v_scale = place(v_scale);
  p.output = place(output);
  const int64_t d = shape.head_dim, hk = shape.num_kv_heads;
  p.query_strides = p.output_strides = {shape.num_heads * d, d};
  p.key_strides = p.value_strides = {shape.kv_block_size * hk * d, hk * d, d};
  p.block_table_stride = max_blocks;
  p.num_rows = num_rows();
  p.num_reqs = num_reqs();
  p.num_heads = shape.num_heads;
  p.num_kv_heads = shape.num_kv_heads;
  p.head_dim = shape.head_dim;
  p.num_blocks = static_cast<int>(key_cache.size() / (shape.kv_block_size * hk * d));
  p.kv_block_size = shape.kv_block_size;
  p.max_query_len = max_query_len;
  p.max_seq_len = max_seq_len;
  p.num_splits = shape.num_splits;
  p.portable = shape.portable;
  p.scale = 1.0f / std::sqrt(static_cast<float>(d));
  p.mask = {std::max(std::min(max_seq_len, max_blocks * shape.kv_block_size), shape.max_keys),
            shape.causal, shape.window_left, shape.window_right};
  p.dtype = dtype_of<T>();
  p.kv_dtype = dtype_of<CacheT>();
  return p;
}

template <typename T, typename CacheT>
std::vector<double> AttentionBatch<T, CacheT>::expected_row(int r, int row, int head) const {
  const int d = shape.head_dim, position = seq_lens[r] - shape.query_lens[r] + row;
  const int64_t t = query_start_loc[r] + row,
                kv_head = head / (shape.num_heads / shape.num_kv_heads);
  std::vector<double> sum(d, 0.0);
  double total = shape.has_sinks ? std::exp(static_cast<double>(sinks[head])) : 0.0;
  for (int key = 0; key < seq_lens[r]; ++key) {
    if (shape.causal && key > position) continue;
    if (shape.window_left >= 0 && position - key > shape.window_left) continue;
    if (shape.window_right >= 0 && key - position > shape.window_right) continue;
    const int64_t at = (slot(r, key) * shape.num_kv_heads + kv_head) * d;
    double score = 0.0;
    for (int i = 0; i < d; ++i) {
      score += double{to_float(query[(t * shape.num_heads + head) * d + i])} *
               to_float(key_cache[at + i]);
    }
    const double weight = std::exp(score * k_scale[0] / std::sqrt(static_cast<double>(d)));
    total += weight;
    for (int i = 0; i < d; ++i) sum[i] += weight * v_scale[0] * to_float(value_cache[at + i]);
  }
  for (double& x : sum) x = total == 0.0 ? 0.0 : x / total;
  return sum;
}

template <typename T, typename CacheT>
AttentionBatch<T, CacheT> AttentionBatch<T, CacheT>::alone(int r, int row) const {
  AttentionBatch b = *this;
  const size_t row_size = size_t(shape.num_heads) * shape.head_dim;
  const auto first = query.begin() + (query_start_loc[r] + row) * row_size;
  b.shape.query_lens = {1};
  b.shape.seq_lens = b.seq_lens = {seq_lens[r] - shape.query_lens[r] + row + 1};
  b.shape.num_spare_rows = 0;
  b.query_start_loc = {0, 1};
  b.query.assign(first, first + row_size);
  b.output.assign(row_size, from_float<T>(kUntouched));
  const auto blocks = block_table.begin() + r * max_blocks;
  b.block_table.assign(blocks, blocks + max_blocks);
  b.max_query_len = 1;
  return b;
}

template <typename T, typename CacheT>
void AttentionBatch<T, CacheT>::expect_output_near(double tolerance) const {
  const int d = shape.head_dim;
  for (int r = 0; r < num_reqs(); ++r) {
    for (int row = 0; row < shape.query_lens[r]; ++row) {
      for (int head = 0; head < shape.num_heads; ++head) {
        const std::vector<double> expected = expected_row(r, row, head);
        const int64_t t = query_start_loc[r] + row;
        for (int i = 0; i < d; ++i) {
          ASSERT_NEAR(to_float(output[(t * shape.num_heads + head) * d + i]), expected[i],
                      tolerance)
              << "request " << r << ", row " << row << ", head " << head << ", column " << i;
        }
      }
    }
  }
  for (size_t i = size_t(query_start_loc.back()) * shape.num_heads * d; i < output.size(); ++i) {
    ASSERT_EQ(to_float(output[i]), kUntouched) << "a row of no request was written";
  }
}

}  // namespace dflash::test
