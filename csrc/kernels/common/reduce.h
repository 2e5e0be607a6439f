// SPDX-License-Identifier: Apache-2.0
// Sums over a group of lanes and over a CTA.
#pragma once

#include <cuda_runtime.h>

namespace dflash {

// The lanes of the caller's group: kLanes neighbours of one warp, a power of two.
template <int kLanes>
__device__ __forceinline__ unsigned lane_group_mask() {
  return (0xffffffffu >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
}

template <int kLanes>
__device__ __forceinline__ float lane_group_sum(float value, unsigned mask) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(mask, value, offset);
  return value;
}

// The sum over all threads, in every thread. blockDim.x is a multiple of 32; `partials` holds one
// float a warp.
__device__ __forceinline__ float block_sum(float value, float* partials) {
  value = lane_group_sum<32>(value, 0xffffffffu);
  if (blockDim.x == 32) return value;
  const int lane = threadIdx.x % 32;
  if (lane == 0) partials[threadIdx.x / 32] = value;
  __syncthreads();
  return lane_group_sum<32>(lane < blockDim.x / 32 ? partials[lane] : 0.0f, 0xffffffffu);
}

}  // namespace dflash
