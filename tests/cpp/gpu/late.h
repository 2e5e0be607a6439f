// SPDX-License-Identifier: Apache-2.0
// A predecessor for kernels that overlap it: it lets its successor start at once and writes late.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "device_place.h"
#include "kernels/common/overlap.h"

namespace dflash::test {

template <typename T>
__global__ void copy_late(T* to, const T* from, int64_t count) {
  let_successor_start();
  const long long start = clock64();
  while (clock64() - start < 400000) continue;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Bytes `before` now at `to`, and `values`, kept by the caller until the device is done, late.
template <typename T>
void write_late(DevicePlace& place, const T* to, std::vector<T>& values, int before) {
  T* const target = const_cast<T*>(to);
  const T* const source = place(values);
  ASSERT_EQ(cudaMemset(target, before, values.size() * sizeof(T)), cudaSuccess);
  copy_late<<<1, 256>>>(target, source, static_cast<int64_t>(values.size()));
}

}  // namespace dflash::test
