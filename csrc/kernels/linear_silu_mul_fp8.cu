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

template <typename T>
struct Fp8SiluMulEpilogue {
  static constexpr bool kInterleaved = false, kHasState = false, kPacked = true;
  static constexpr int kBytes = gemm::RowStore<T, 1>::kBytes;

  gemm::RowStore<T, 1> rows;
  const float* scale;  // of gate and up, in the order of the weight

  static Fp8SiluMulEpilogue of(const LinearFp8Params& p, T* output) {
    return {{output, p.output_stride, p.num_outputs / 2}, p.scale};
  }

  template <int kFirst, int kRows, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], int num_rows,
                                         int column, uint8_t* smem) const {
    const int mine = column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const float gate = fp8::scale_of(scale, mine, 2 * rows.num_outputs);
    const float up = fp8::scale_of(scale, mine + 8, 2 * rows.num_outputs);
    rows.template put<kFirst, kRows>(
        acc, num_rows, column / 2, smem, [&](const float(&fragment)[4], uint32_t(&packed)[1]) {
          packed[0] = pack2<T>(value(fragment[0] * gate, fragment[2] * up),
                               value(fragment[1] * gate, fragment[3] * up));
        });
  }

  __device__ __forceinline__ static float value(float gate, float up) {
    return silu_mul_of(round_to<T>(gate), round_to<T>(up));
  }
};

}  // namespace

cudaError_t launch_linear_silu_mul_fp8(const LinearFp8Params& params, cudaStream_t stream) {
  const bool in_turns = params.num_outputs % 16 == 0 && params.bias == nullptr;
  return in_turns ? fp8::launch<Fp8SiluMulEpilogue>(params, stream) : cudaErrorInvalidValue;
}

}  // namespace dflash
