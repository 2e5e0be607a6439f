// SPDX-License-Identifier: Apache-2.0
#include "kernels/precompute_context_kv.h"

#include "kernels/add_rms_norm.h"
#include "kv_checks.h"

namespace dflash {
namespace {

// "key_caches[3]": the argument and which of its tensors.
std::string indexed(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

void check_layer_count(const std::vector<Tensor>& key_caches,
                       const std::vector<Tensor>& value_caches,
                       const std::vector<int64_t>& layer_groups) {
  const size_t num_layers = key_caches.size();
  STD_TORCH_CHECK(num_layers >= 1 && num_layers <= kMaxContextLayers, "key_caches: expected 1 to ",
                  kMaxContextLayers, " layers a call, got ", num_layers);
  STD_TORCH_CHECK(value_caches.size() == num_layers, "value_caches: expected ", num_layers,
                  " layers like key_caches, got ", value_caches.size());
  STD_TORCH_CHECK(layer_groups.size() == num_layers,
                  "layer_groups: expected one group for each of ", num_layers, " layers, got ",
                  layer_groups.size());
}

void check_layer_caches(const std::vector<Tensor>& key_caches,
                        const std::vector<Tensor>& value_caches, const Tensor& hidden_states) {
  for (size_t l = 0; l < key_caches.size(); ++l) {
    const std::string key_name = indexed("key_caches", l);
    check_caches(key_caches[l], key_name.c_str(), value_caches[l],
                 indexed("value_caches", l).c_str(), hidden_states);
    check_tensor(key_caches[l], key_name.c_str(),
                 {-1, -1, key_caches[0].size(2), key_caches[0].size(3)},
                 key_caches[0].scalar_type(), hidden_states);
  }
}

void check_groups(const std::vector<Tensor>& slot_mappings,
                  const std::vector<int64_t>& layer_groups, const std::vector<Tensor>& key_caches,
                  const Tensor& hidden_states) {
  const int64_t num_groups = static_cast<int64_t>(slot_mappings.size());
  for (int64_t g = 0; g < num_groups; ++g) {
    check_tensor(slot_mappings[g], indexed("slot_mappings", g).c_str(), {hidden_states.size(0)},
                 ScalarType::Long, hidden_states);
  }
  for (size_t l = 0; l < layer_groups.size(); ++l) {
    const int64_t group = layer_groups[l];
    STD_TORCH_CHECK(group >= 0 && group < num_groups, "layer_groups: layer ", l, " names group ",
                    group, ", but there are ", num_groups, " slot_mappings");
    check_slots(slot_mappings[group], indexed("slot_mappings", group).c_str(), key_caches[l]);
  }
}

void check_weights(const Tensor& hidden_states, const std::optional<Tensor>& hidden_norm_weight,
                   const Tensor& kv_weight, const std::optional<Tensor>& kv_bias,
                   const std::optional<Tensor>& k_norm_weight, int64_t num_layers,
                   int64_t num_kv_heads, int64_t head_dim) {
  const ScalarType dtype = hidden_states.scalar_type();
  const int64_t size = hidden_states.size(1);
  const int64_t kv_size = num_layers * 2 * num_kv_heads * head_dim;
  check_shape(kv_weight, "kv_weight", {-1, -1});
  STD_TORCH_CHECK(kv_weight.size(0) == kv_size && kv_weight.size(1) == size, "kv_weight: expected ",
                  num_layers, " layers * 2 * ", num_kv_heads, " heads * head_dim ", head_dim, " = ",
                  kv_size, " rows of ", size, " columns, got ", shape_string(kv_weight));
  check_tensor(kv_weight, "kv_weight", {kv_size, size}, dtype, hidden_states);
  if (hidden_norm_weight.has_value()) {
    check_tensor(*hidden_norm_weight, "hidden_norm_weight", {size}, dtype, hidden_states);
  }
  if (kv_bias.has_value()) check_tensor(*kv_bias, "kv_bias", {kv_size}, dtype, hidden_states);
  if (k_norm_weight.has_value()) {
    check_tensor(*k_norm_weight, "k_norm_weight", {num_layers, head_dim}, dtype, hidden_states);
    check_contiguous(*k_norm_weight, "k_norm_weight");
  }
}

// hidden_norm, rounded to the model's dtype as the GEMM reads it.
Tensor norm(const Tensor& hidden_states, const Tensor& weight, double eps) {
  const int64_t num_rows = hidden_states.size(0);
  const int64_t size = hidden_states.size(1);
  Tensor output = torch::stable::new_empty(hidden_states, {num_rows, size});
  AddRmsNormParams params{};
  params.residual = hidden_states.data_ptr();
  params.weight = weight.data_ptr();
  params.output = output.data_ptr();
  params.num_rows = num_rows;
  params.size = size;
  params.residual_stride = hidden_states.stride(0);
  params.output_stride = size;
  params.eps = static_cast<float>(eps);
  params.dtype = to_dtype(hidden_states);
  DFLASH_LAUNCH(add_rms_norm, params, hidden_states);
  return output;
}

// The GEMM, the rest and the store in one kernel, where that serves. hidden_norm stays ahead of it:
// the GEMM asks for its first weights while the norm still runs, and reads rows that are rounded.
bool try_project(const PrecomputeContextKvParams& params, const Tensor& context) {
#ifdef DFLASH_CUDA
  const bool is_hopper = device_properties(context.get_device_index()).major == 9;
  if (!is_hopper || !can_project_context_kv(params)) return false;
  DFLASH_LAUNCH(project_context_kv, params, context);
  return true;
#else
  static_cast<void>(params);
  static_cast<void>(context);
  return false;
#endif
}

}  // namespace

void precompute_context_kv(const Tensor& hidden_states,
                           const std::optional<Tensor>& hidden_norm_weight, double rms_norm_eps,
                           const Tensor& kv_weight, const std::optional<Tensor>& kv_bias,
                           const std::optional<Tensor>& k_norm_weight, const Tensor& cos_sin_cache,
                           bool is_neox, const Tensor& positions, std::vector<Tensor> slot_mappings,
                           std::vector<int64_t> layer_groups, double value_scale,
                           const std::optional<Tensor>& k_scales,
                           const std::optional<Tensor>& v_scales, std::vector<Tensor> key_caches,
                           std::vector<Tensor> value_caches) {
  check_shape(hidden_states, "hidden_states", {-1, -1});
  check_floating(hidden_states, "hidden_states");
  check_last_dim_contiguous(hidden_states, "hidden_states");
  STD_TORCH_CHECK(hidden_states.size(1) > 0, "hidden_states: the hidden size is 0");
  check_layer_count(key_caches, value_caches, layer_groups);
  check_layer_caches(key_caches, value_caches, hidden_states);
  const int64_t num_rows = hidden_states.size(0);
  const int64_t num_layers = static_cast<int64_t>(key_caches.size());
  const int64_t num_kv_heads = key_caches[0].size(2);
  const int64_t head_dim = key_caches[0].size(3);
  check_weights(hidden_states, hidden_norm_weight, kv_weight, kv_bias, k_norm_weight, num_layers,
                num_kv_heads, head_dim);
  check_tensor(positions, "positions", {num_rows}, ScalarType::Long, hidden_states);
  check_groups(slot_mappings, layer_groups, key_caches, hidden_states);
  check_scale(k_scales, "k_scales", num_layers, key_caches[0]);
  check_scale(v_scales, "v_scales", num_layers, key_caches[0]);
  const RopeTable rope = to_rope_table(cos_sin_cache, is_neox, head_dim, hidden_states);
  if (num_rows == 0) return;
  check_positions(positions, cos_sin_cache);

  const Tensor context = hidden_norm_weight.has_value()
                             ? norm(hidden_states, *hidden_norm_weight, rms_norm_eps)
                             : hidden_states;
  PrecomputeContextKvParams params{};
  params.product = {context.data_ptr(), kv_weight.data_ptr(),  num_rows,
                    kv_weight.size(0),  kv_weight.size(1),     context.stride(0),
                    kv_weight.stride(0), to_dtype(hidden_states)};
  params.kv_bias = data_ptr<void>(kv_bias);
  params.k_norm_weight = data_ptr<void>(k_norm_weight);
  params.positions = data_ptr<const int64_t>(positions);
  params.k_scales = data_ptr<const float>(k_scales);
  params.v_scales = data_ptr<const float>(v_scales);
  params.rope = rope;
  params.num_rows = num_rows;
  params.num_layers = static_cast<int>(num_layers);
  params.num_kv_heads = static_cast<int>(num_kv_heads);
  params.head_dim = static_cast<int>(head_dim);
  params.eps = static_cast<float>(rms_norm_eps);
  params.value_scale = static_cast<float>(value_scale);
  params.dtype = to_dtype(hidden_states);
  params.cache_dtype = to_dtype(key_caches[0]);
  for (int64_t l = 0; l < num_layers; ++l) {
    params.layers[l] = ContextLayer{to_kv_cache(key_caches[l]), to_kv_cache(value_caches[l]),
                                    data_ptr<const int64_t>(slot_mappings[layer_groups[l]]),
                                    key_caches[l].size(1)};
  }
  if (try_project(params, context)) return;
  // [T, L * 2 * num_kv_heads * D]: K and V of all layers before bias, norm and RoPE.
  const Tensor kv =
      torch::stable::matmul(context, torch::stable::transpose(kv_weight, 0, 1));
  params.kv = kv.data_ptr();
  DFLASH_LAUNCH(precompute_context_kv, params, hidden_states);
}

}  // namespace dflash

DFLASH_REGISTER(precompute_context_kv)
