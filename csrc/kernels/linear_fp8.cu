// SPDX-License-Identifier: Apache-2.0
// output = x (weight * scale)^T + bias with e4m3 weights: the streaming GEMM, whose weights come as
// bytes and are widened on their way into the tensor cores; the scale of an output multiplies its
// sum in fp32. Bytes moved: the weight, half of linear's, once every 128 rows.
// unpack_kernel: the weight in the dtype of x, for the library's GEMM where this one cannot serve;
// a thread has four weights.
#include "linear_fp8.h"

#include "common/fp8_launch.h"

namespace dflash {
namespace {

struct StoreBoth {
  static constexpr int kMatrices = 2;

  template <typename T>
  __device__ __forceinline__ static void pack(const float (&values)[4], uint32_t (&packed)[2]) {
    packed[0] = pack2<T>(values[0], values[1]);
    packed[1] = pack2<T>(values[2], values[3]);
  }
};

struct UnpackParams {
  const uint8_t* weight;  // from the first row's tile on
  const float* scale;     // of the first row
  void* rows;
  int64_t num_words;  // of the tiles
  int64_t count, size, num_atoms;
};

// A word is two neighbouring weights of row g + 8 (bytes 0 and 2) and of row g (bytes 1 and 3).
template <typename T>
__global__ void __launch_bounds__(256) unpack_kernel(const UnpackParams p) {
  const int64_t word = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (word >= p.num_words) return;
  const int64_t tile = word / (fp8::kTileBytes / 4);
  const int at = static_cast<int>(word % (fp8::kTileBytes / 4)), lane = at / 4 % 32;
  const int first_row = at / 256 * 16 + lane / 4;
  const int first_column = at / 128 % 2 * 32 + at % 4 * 8 + lane % 4 * 2;
  const uint32_t bytes = reinterpret_cast<const uint32_t*>(p.weight)[word];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = tile / p.num_atoms * fp8::kTileSize + first_row + (i % 2 == 0 ? 8 : 0);
    const int64_t column = tile % p.num_atoms * fp8::kTileSize + first_column + i / 2;
    if (row >= p.count || column >= p.size) continue;
    const float value = to_float(Float8E4M3{static_cast<uint8_t>(bytes >> 8 * i)});
    static_cast<T*>(p.rows)[row * p.size + column] = from_float<T>(value * p.scale[row]);
  }
}

}  // namespace

cudaError_t launch_linear_fp8(const LinearFp8Params& params, cudaStream_t stream) {
  return fp8::launch<StoreBoth>(params, stream);
}

cudaError_t launch_unpack_fp8(const LinearFp8Params& params, int64_t first, int64_t count,
                              void* rows, cudaStream_t stream) {
  const int64_t num_atoms = fp8::num_tiles(params.size);
  const int64_t offset = first / fp8::kTileSize * num_atoms * fp8::kTileBytes;
  const int64_t num_words = fp8::num_tiles(count) * num_atoms * (fp8::kTileBytes / 4);
  if (num_words == 0) return cudaSuccess;
  const UnpackParams p{params.weight + offset, params.scale + first, rows, num_words,
                       count,                  params.size,          num_atoms};
  const auto num_ctas = static_cast<unsigned>((num_words + 255) / 256);
  DFLASH_DISPATCH_FLOATING(params.dtype, unpack_kernel<scalar_t><<<num_ctas, 256, 0, stream>>>(p));
  return cudaGetLastError();
}

}  // namespace dflash
