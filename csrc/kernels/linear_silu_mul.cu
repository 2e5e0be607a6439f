// SPDX-License-Identifier: Apache-2.0
// output = silu(gate) * up with [gate, up] = x weight^T: the streaming GEMM over 8 rows of gate and
// 8 of up in turns. Both are rounded as if they had been stored, so a row has the bits of linear
// and silu_mul on at most 128 rows. Bytes moved: the weight, once every 256 rows.
#include "linear_silu_mul.h"

#include "common/gemm_launch.h"
#include "common/gemm_store.h"
#include "common/silu.h"

namespace dflash {
namespace {

template <typename T>
struct SiluMulEpilogue {
  static constexpr bool kInterleaved = true, kHasState = false, kPacked = false;
  static constexpr int kBytes = gemm::RowStore<T, 1>::kBytes;

  gemm::RowStore<T, 1> rows;

  __device__ __forceinline__ SiluMulEpilogue from_row(int row) const {
    SiluMulEpilogue epilogue = *this;
    epilogue.rows.output += row * rows.stride;
    return epilogue;
  }

  // Of a fragment's two matrices the first is gate, the second the same columns of up.
  template <int kFirst, int kRows, int kFragments>
  __device__ __forceinline__ void finish(const float (&acc)[kFragments][4], int num_rows,
                                         int column, uint8_t* smem) const {
    rows.template put<kFirst, kRows>(
        acc, num_rows, column / 2, smem, [](const float(&fragment)[4], uint32_t(&packed)[1]) {
          packed[0] = pack2<T>(value(fragment[0], fragment[2]), value(fragment[1], fragment[3]));
        });
  }

  __device__ __forceinline__ static float value(float gate, float up) {
    return silu_mul_of(round_to<T>(gate), round_to<T>(up));
  }
};

template <typename T>
cudaError_t launch(const LinearSiluMulParams& p, cudaStream_t stream) {
  const SiluMulEpilogue<T> epilogue{{p.output, p.output_stride, p.num_outputs}};
  const gemm::Operands o = p.operands();
  if (gemm::takes_row_blocks(o))
    return gemm::launch_shape<T, gemm::kMaxRows, 3, /*kSharesWeight=*/true>(o, 1, epilogue, stream);
  return gemm::launch_gemm<T>(o, epilogue, stream);
}

}  // namespace

cudaError_t launch_linear_silu_mul(const LinearSiluMulParams& params, cudaStream_t stream) {
  if (device_properties().major != 9 || !can_fuse(params)) return cudaErrorInvalidValue;
  if (params.dtype == DType::kFloat16) return launch<Half>(params, stream);
  return launch<BFloat16>(params, stream);
}

}  // namespace dflash
