// SPDX-License-Identifier: Apache-2.0
// 16-byte loads and stores.
#pragma once

#include "dtype.h"

namespace dflash {

// kN elements moved as one access; kN * sizeof(T) is 4, 8 or 16.
template <typename T, int kN>
struct alignas(sizeof(T) * kN) Vec {
  T x[kN];
};

// Elements of T in 16 bytes.
template <typename T>
inline constexpr int kVec = 16 / sizeof(T);

template <int kN, typename T>
DFLASH_HOST_DEVICE Vec<T, kN> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, kN>*>(p);
}

template <int kN, typename T>
DFLASH_HOST_DEVICE void store_vec(T* p, const Vec<T, kN>& v) {
  *reinterpret_cast<Vec<T, kN>*>(p) = v;
}

inline bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether rows at `pointer` with `stride` elements between them and `size` elements each can be moved in 16-byte steps.
template <typename T>
inline bool rows_are_vectorizable(const void* pointer, int64_t stride, int64_t size) {
  return is_aligned(pointer, 16) && stride % kVec<T> == 0 && size % kVec<T> == 0;
}

}  // namespace dflash
