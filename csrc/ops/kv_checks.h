// SPDX-License-Identifier: Apache-2.0
// Checks of caches, RoPE tables, positions and slots, for the ops that store K and V.
#pragma once

#include "kernels/common/kv_cache.h"
#include "torch_utils.h"

namespace dflash {

inline KvCache to_kv_cache(const Tensor& cache) {
  return KvCache{cache.data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

inline void check_cache(const Tensor& cache, const char* name, const Tensor& input) {
  check_shape(cache, name, {-1, -1, -1, -1});
  check_last_dim_contiguous(cache, name);
  check_same_device(cache, name, input);
  const ScalarType dtype = cache.scalar_type();
  STD_TORCH_CHECK(dtype == input.scalar_type() || dtype == ScalarType::Float8_e4m3fn, name,
                  ": expected ", dtype_name(input.scalar_type()), " or float8_e4m3fn, got ",
                  dtype_name(dtype));
  STD_TORCH_CHECK(cache.size(1) > 0 && cache.size(2) > 0, name,
                  ": expected at least one token a block and one head, got ", shape_string(cache));
  const int64_t head_dim = cache.size(3);
  STD_TORCH_CHECK(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % 2 == 0, name,
                  ": head_dim must be even and at most ", kMaxHeadDim, ", got ", head_dim);
}

// Both caches of a layer: the same shape and dtype, each with strides of its own.
inline void check_caches(const Tensor& key_cache, const char* key_name, const Tensor& value_cache,
                         const char* value_name, const Tensor& input) {
  check_cache(key_cache, key_name, input);
  check_tensor(value_cache, value_name,
               {key_cache.size(0), key_cache.size(1), key_cache.size(2), key_cache.size(3)},
               key_cache.scalar_type(), input);
}

// A scale for a cache that holds unscaled values would be read by attention and not by the store.
inline void check_scale(const std::optional<Tensor>& scale, const char* name, int64_t size,
                        const Tensor& cache) {
  if (!scale.has_value()) return;
  STD_TORCH_CHECK(cache.scalar_type() == ScalarType::Float8_e4m3fn, name,
                  ": only a float8_e4m3fn cache is scaled, this one is ",
                  dtype_name(cache.scalar_type()));
  check_tensor(*scale, name, {size}, ScalarType::Float, cache);
}

inline RopeTable to_rope_table(const Tensor& cos_sin_cache, bool is_neox, int64_t head_dim,
                               const Tensor& input) {
  check_tensor(cos_sin_cache, "cos_sin_cache", {-1, -1}, ScalarType::Float, input);
  const int64_t rotary_dim = cos_sin_cache.size(1);
  STD_TORCH_CHECK(
      rotary_dim % 2 == 0 && rotary_dim <= head_dim,
      "cos_sin_cache: rotary_dim (the last dimension) must be even and at most head_dim ", head_dim,
      ", got ", rotary_dim);
  return RopeTable{data_ptr<const float>(cos_sin_cache), cos_sin_cache.stride(0),
                   static_cast<int>(rotary_dim), is_neox};
}

// On a CPU the indices can be read, so a bad one is an error there. A kernel trusts them.
inline void check_positions(const Tensor& positions, const Tensor& cos_sin_cache) {
#ifdef DFLASH_CUDA
  static_cast<void>(positions);
  static_cast<void>(cos_sin_cache);
#else
  const int64_t* begin = data_ptr<const int64_t>(positions);
  const int64_t limit = cos_sin_cache.size(0);
  for (const int64_t* p = begin; p != begin + positions.size(0); ++p) {
    STD_TORCH_CHECK(*p >= 0 && *p < limit, "positions: row ", p - begin, " is at ", *p,
                    ", but cos_sin_cache has ", limit, " positions");
  }
#endif
}

inline void check_slots(const Tensor& slot_mapping, const char* name, const Tensor& cache) {
#ifdef DFLASH_CUDA
  static_cast<void>(slot_mapping);
  static_cast<void>(name);
  static_cast<void>(cache);
#else
  const int64_t* begin = data_ptr<const int64_t>(slot_mapping);
  const int64_t limit = cache.size(0) * cache.size(1);
  for (const int64_t* s = begin; s != begin + slot_mapping.size(0); ++s) {
    STD_TORCH_CHECK(*s >= -1 && *s < limit, name, ": row ", s - begin, " names slot ", *s,
                    ", but the cache has ", limit, " slots");
  }
#endif
}

}  // namespace dflash
