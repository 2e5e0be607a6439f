// SPDX-License-Identifier: Apache-2.0
// output = silu(gate) * up of linear_fp8's products, whose rows are packed 8 of gate and 8 of up in
// turns: the first and the second matrix of a fragment. Both are rounded as if they had been
// stored, so the result is that of linear_fp8 and silu_mul, bit for bit. Bytes moved: the weight,
// once every 128 rows.
#include "linear_silu_mul_fp8.h"

#include "common/fp8_launch.h"
#include "common/silu.h"

namespace dflash {
namespace {

struct StoreSiluMul {
  static constexpr int kMatrices = 1;

  template <typename T>
  __device__ __forceinline__ static void pack(const float (&values)[4], uint32_t (&packed)[1]) {
    packed[0] = pack2<T>(silu_mul_of(round_to<T>(values[0]), round_to<T>(values[2])),
                         silu_mul_of(round_to<T>(values[1]), round_to<T>(values[3])));
  }
};

}  // namespace

cudaError_t launch_linear_silu_mul_fp8(const LinearFp8Params& params, cudaStream_t stream) {
  const bool in_turns = params.num_outputs % 16 == 0 && params.bias == nullptr;
  return in_turns ? fp8::launch<StoreSiluMul>(params, stream) : cudaErrorInvalidValue;
}

}  // namespace dflash
