// SPDX-License-Identifier: Apache-2.0
#include "kernels/qk_norm_rope_store.h"

#include "kv_checks.h"

namespace dflash {
namespace {

void check_norm_weight(const std::optional<Tensor>& weight, const char* name, int64_t head_dim,
                       const Tensor& qkv) {
  if (weight.has_value()) check_tensor(*weight, name, {head_dim}, qkv.scalar_type(), qkv);
}

void check_qkv(const Tensor& qkv, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim) {
  const int64_t expected = (num_heads + 2 * num_kv_heads) * head_dim;
  STD_TORCH_CHECK(qkv.size(1) == expected, "qkv: expected (", num_heads, " + 2 * ", num_kv_heads,
                  ") * ", head_dim, " = ", expected, " columns, got ", qkv.size(1));
}

}  // namespace

void qk_norm_rope_store(const Tensor& qkv, const std::optional<Tensor>& q_norm_weight,
                        const std::optional<Tensor>& k_norm_weight, double rms_norm_eps,
                        const Tensor& cos_sin_cache, bool is_neox, const Tensor& positions,
                        const Tensor& slot_mapping, double value_scale,
                        const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                        Tensor query, Tensor key_cache, Tensor value_cache) {
  check_shape(qkv, "qkv", {-1, -1});
  check_floating(qkv, "qkv");
  check_last_dim_contiguous(qkv, "qkv");
  check_caches(key_cache, "key_cache", value_cache, "value_cache", qkv);
  const int64_t num_rows = qkv.size(0);
  const int64_t num_kv_heads = key_cache.size(2);
  const int64_t head_dim = key_cache.size(3);
  check_tensor(query, "query", {num_rows, -1, head_dim}, qkv.scalar_type(), qkv);
  check_qkv(qkv, query.size(1), num_kv_heads, head_dim);
  check_norm_weight(q_norm_weight, "q_norm_weight", head_dim, qkv);
  check_norm_weight(k_norm_weight, "k_norm_weight", head_dim, qkv);
  check_tensor(positions, "positions", {num_rows}, ScalarType::Long, qkv);
  check_tensor(slot_mapping, "slot_mapping", {num_rows}, ScalarType::Long, qkv);
  check_scale(k_scale, "k_scale", 1, key_cache);
  check_scale(v_scale, "v_scale", 1, value_cache);
  const RopeTable rope = to_rope_table(cos_sin_cache, is_neox, head_dim, qkv);
  if (num_rows == 0) return;
  check_positions(positions, cos_sin_cache);
  check_slots(slot_mapping, "slot_mapping", key_cache);

  QkNormRopeStoreParams params{};
  params.qkv = qkv.data_ptr();
  params.q_norm_weight = data_ptr<void>(q_norm_weight);
  params.k_norm_weight = data_ptr<void>(k_norm_weight);
  params.positions = data_ptr<const int64_t>(positions);
  params.slot_mapping = data_ptr<const int64_t>(slot_mapping);
  params.k_scale = data_ptr<const float>(k_scale);
  params.v_scale = data_ptr<const float>(v_scale);
  params.query = query.data_ptr();
  params.key_cache = to_kv_cache(key_cache);
  params.value_cache = to_kv_cache(value_cache);
  params.rope = rope;
  params.num_rows = num_rows;
  params.kv_block_size = key_cache.size(1);
  params.qkv_stride = qkv.stride(0);
  params.query_row_stride = query.stride(0);
  params.query_head_stride = query.stride(1);
  params.num_heads = static_cast<int>(query.size(1));
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.eps = static_cast<float>(rms_norm_eps);
  params.value_scale = static_cast<float>(value_scale);
  params.dtype = to_dtype(qkv);
  params.cache_dtype = to_dtype(key_cache);
  DFLASH_LAUNCH(qk_norm_rope_store, params, qkv);
}

}  // namespace dflash

DFLASH_REGISTER(qk_norm_rope_store)
