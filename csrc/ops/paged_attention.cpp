// SPDX-License-Identifier: Apache-2.0
#include "kernels/paged_attention.h"

#include <algorithm>
#include <limits>

#include "torch_utils.h"

namespace dflash {
namespace {

// Lengths are int32 on the device; a larger bound bounds nothing.
int clamp_to_int(int64_t x) {
  return static_cast<int>(
      std::min<int64_t>(std::max<int64_t>(x, 0), std::numeric_limits<int32_t>::max()));
}

// -1 for no bound, and for one that no position can reach.
int window_bound(int64_t window) {
  return window < 0 || window >= (int64_t{1} << 30) ? -1 : static_cast<int>(window);
}

void check_head_dim(int64_t head_dim) {
#ifdef DFLASH_CUDA
  const bool supported = head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256;
  STD_TORCH_CHECK(supported, "query: expected head_dim 64, 96, 128 or 256, got ", head_dim);
#else
  STD_TORCH_CHECK(head_dim > 0 && head_dim <= 256 && head_dim % 8 == 0,
                  "query: expected head_dim a multiple of 8 up to 256, got ", head_dim);
#endif
}

void check_cache(const Tensor& cache, const char* name, const Tensor& key_cache,
                 const Tensor& query) {
  check_shape(cache, name,
              {key_cache.size(0), key_cache.size(1), key_cache.size(2), query.size(2)});
  const ScalarType type = cache.scalar_type();
  STD_TORCH_CHECK(type == key_cache.scalar_type() &&
                      (type == query.scalar_type() || type == ScalarType::Float8_e4m3fn),
                  name, ": expected ", dtype_name(query.scalar_type()),
                  " or float8_e4m3fn, the same for both caches, got ", dtype_name(type));
  check_last_dim_contiguous(cache, name);
  check_same_device(cache, name, query);
}

void check_optional(const std::optional<Tensor>& t, const char* name, int64_t size,
                    const Tensor& query) {
  if (!t.has_value()) return;
  check_tensor(*t, name, {size}, ScalarType::Float, query);
}

CacheStrides cache_strides(const Tensor& cache) {
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

}  // namespace

void paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                     const Tensor& block_table, const Tensor& seq_lens,
                     const Tensor& query_start_loc, int64_t max_query_len, int64_t max_seq_len,
                     double scale, bool causal, int64_t window_left, int64_t window_right,
                     const std::optional<Tensor>& sinks, const std::optional<Tensor>& k_scale,
                     const std::optional<Tensor>& v_scale, int64_t num_splits, Tensor output) {
  check_shape(query, "query", {-1, -1, -1});
  check_floating(query, "query");
  check_last_dim_contiguous(query, "query");
  check_shape(key_cache, "key_cache", {-1, -1, -1, -1});
  check_cache(key_cache, "key_cache", key_cache, query);
  check_cache(value_cache, "value_cache", key_cache, query);
  const int64_t num_rows = query.size(0), num_heads = query.size(1), head_dim = query.size(2);
  const int64_t num_kv_heads = key_cache.size(2),
                num_reqs = seq_lens.dim() > 0 ? seq_lens.size(0) : 0;
  check_tensor(seq_lens, "seq_lens", {num_reqs}, ScalarType::Int, query);
  check_tensor(block_table, "block_table", {num_reqs, -1}, ScalarType::Int, query);
  check_tensor(query_start_loc, "query_start_loc", {num_reqs + 1}, ScalarType::Int, query);
  check_optional(sinks, "sinks", num_heads, query);
  check_optional(k_scale, "k_scale", 1, query);
  check_optional(v_scale, "v_scale", 1, query);
  check_tensor(output, "output", {num_rows, num_heads, head_dim}, query.scalar_type(), query);
  STD_TORCH_CHECK(num_kv_heads > 0 && num_heads % num_kv_heads == 0,
                  "query: the number of heads must be a multiple of key_cache's, got ", num_heads,
                  " and ", num_kv_heads);
  check_head_dim(head_dim);
  STD_TORCH_CHECK(num_reqs <= 65535, "seq_lens: at most 65535 requests, got ", num_reqs);
  STD_TORCH_CHECK(key_cache.size(1) > 0, "key_cache: kv_block_size must be at least 1");
  STD_TORCH_CHECK(attention::splits_are_valid(num_splits),
                  "num_splits: expected 0, 1, 2, 4 or 8, got ", num_splits);
  if (num_rows == 0 || num_reqs == 0 || num_heads == 0 || max_query_len <= 0) return;

  PagedAttentionParams params{};
  params.query = query.data_ptr();
  params.key_cache = key_cache.data_ptr();
  params.value_cache = value_cache.data_ptr();
  params.block_table = data_ptr<const int32_t>(block_table);
  params.seq_lens = data_ptr<const int32_t>(seq_lens);
  params.query_start_loc = data_ptr<const int32_t>(query_start_loc);
  params.sinks = data_ptr<const float>(sinks);
  params.k_scale = data_ptr<const float>(k_scale);
  params.v_scale = data_ptr<const float>(v_scale);
  params.output = output.data_ptr();
  params.query_strides = {query.stride(0), query.stride(1)};
  params.output_strides = {output.stride(0), output.stride(1)};
  params.key_strides = cache_strides(key_cache);
  params.value_strides = cache_strides(value_cache);
  params.block_table_stride = block_table.stride(0);
  params.num_rows = static_cast<int>(num_rows);
  params.num_reqs = static_cast<int>(num_reqs);
  params.num_heads = static_cast<int>(num_heads);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.num_blocks = static_cast<int>(key_cache.size(0));
  params.kv_block_size = static_cast<int>(key_cache.size(1));
  params.max_query_len = clamp_to_int(max_query_len);
  params.max_seq_len = clamp_to_int(max_seq_len);
  params.num_splits = static_cast<int>(num_splits);
  params.scale = static_cast<float>(scale);
  const int64_t capacity = block_table.size(1) * key_cache.size(1);
  params.mask = {clamp_to_int(std::min(max_seq_len, capacity)), causal, window_bound(window_left),
                 window_bound(window_right)};
  params.dtype = to_dtype(query);
  params.kv_dtype = to_dtype(key_cache);
  DFLASH_LAUNCH(paged_attention, params, query);
}

}  // namespace dflash

DFLASH_REGISTER(paged_attention)
