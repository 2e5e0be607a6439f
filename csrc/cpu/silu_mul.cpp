// SPDX-License-Identifier: Apache-2.0
#include "kernels/silu_mul.h"

#include "simd.h"

namespace dflash::cpu {
namespace {

template <typename scalar_t>
DFLASH_INLINE void row(const SiluMulParams& p, int64_t r) {
  const scalar_t* gate = static_cast<const scalar_t*>(p.gate_up) + r * p.gate_up_stride;
  const scalar_t* up = gate + p.size;
  scalar_t* out = static_cast<scalar_t*>(p.output) + r * p.output_stride;
  for (int64_t i = 0; i < p.size; ++i) {
    const float g = to_float(gate[i]);
    out[i] = from_float<scalar_t>(g / (1.0f + fast_exp(-g)) * to_float(up[i]));
  }
}

DFLASH_CPU_CLONES void rows(const SiluMulParams& p, int64_t begin, int64_t end) {
  DFLASH_DISPATCH_FLOATING(p.dtype, for (int64_t r = begin; r < end; ++r) row<scalar_t>(p, r));
}

}  // namespace

void silu_mul(const SiluMulParams& params) {
  parallel_for(params.num_rows, 1 + 16384 / params.size,
               [&](int64_t begin, int64_t end) { rows(params, begin, end); });
}

}  // namespace dflash::cpu
