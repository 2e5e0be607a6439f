// SPDX-License-Identifier: Apache-2.0
// silu(gate) * up, as every kernel that ends in it computes it.
#pragma once

namespace dflash {

__device__ __forceinline__ float silu_mul_of(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

}  // namespace dflash
