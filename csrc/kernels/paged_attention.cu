// SPDX-License-Identifier: Apache-2.0
// Attention of ragged query rows over a paged cache, split over keys. A CTA owns one split of one
// tile of rows; lengths are read on the device, and a CTA without work leaves. A tile with one
// active split writes the output, else partial results that combine_kernel merges in split order.
// Bytes moved: visible K and V once a tile, query and output once, partials (D + 2) floats a row,
// head and split.
#include <initializer_list>
#include <type_traits>

#include "common/attention_fp32.h"
#include "common/attention_mma.h"
#include "common/device.h"
#include "paged_attention.h"

namespace dflash {
namespace {

using namespace attention;

// Merges the splits of rows that had several, in split order. A warp owns one row and head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ PagedAttentionParams p, int max_splits, int tile_m) {
  __shared__ float weights[kThreads / 32][kMaxSplits];
  // Every CTA waits, also one without work: a successor must not start before the partials' kernel
  // is done.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int lane = threadIdx.x % 32;
  const int item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  const int head = item % p.num_heads, row = item / p.num_heads;
  const Request request = load_request(p, blockIdx.z);
  if (row >= request.query_len) return;

  const int ratio = p.num_heads / p.num_kv_heads;
  const int first = (row * ratio + head % ratio) / tile_m * tile_m;
  const int last = min(first + tile_m, request.query_len * ratio) - 1;
  const KeyRange tile =
      tile_keys(p.mask, request.seq_len, request.query_len, first / ratio, last / ratio);
  const int num_splits = split_keys(tile, max_splits, kBlockN).num_splits;
  if (num_splits <= 1) return;

  const Partials in = partials(p, max_splits);
  const int64_t t = request.begin + row;
  float top = kNothing;
  for (int s = lane; s < num_splits; s += 32)
    top = fmaxf(top, in.state[partial_row(p, s, t, head)].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
  float l = 0.0f;
  float* weight = weights[threadIdx.x / 32];
  for (int s = lane; s < num_splits; s += 32) {
    const float2 state = in.state[partial_row(p, s, t, head)];
    weight[s] = weight_of(state.x, top);
    l += weight[s] * state.y;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(0xffffffffu, l, step);
  __syncwarp();

  const float factor = output_factor(p, head, top, l);
  T* out = static_cast<T*>(p.output) + t * p.output_strides.row + head * p.output_strides.head;
  const int64_t step = static_cast<int64_t>(p.num_rows) * p.num_heads * p.head_dim;
  for (int column = lane; column < p.head_dim; column += 32) {
    const float* acc = in.acc + partial_row(p, 0, t, head) * p.head_dim + column;
    float sum = 0.0f;
#pragma unroll 4
    for (int s = 0; s < num_splits; ++s) sum += weight[s] * acc[s * step];
    out[column] = from_float<T>(factor == 0.0f ? 0.0f : sum * factor);
  }
}

bool aligned_to(int64_t bytes, const void* pointer, std::initializer_list<int64_t> byte_strides) {
  bool aligned = reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  for (int64_t stride : byte_strides) aligned = aligned && stride % bytes == 0;
  return aligned;
}

Plan make_plan(const PagedAttentionParams& p, int tile_m) {
  const int64_t size = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t kv_size = p.kv_dtype == DType::kFloat8E4M3 ? 1 : size;
  const auto cache_is_aligned = [kv_size](const void* cache, const CacheStrides& s) {
    return aligned_to(16, cache, {s.block * kv_size, s.offset * kv_size, s.head * kv_size});
  };
  Plan plan;
  plan.num_splits = num_splits(p.num_rows, p.num_reqs, p.num_heads, p.num_kv_heads, tile_m,
                               p.max_seq_len, device_properties().num_sms);
  plan.query_aligned =
      aligned_to(16, p.query, {p.query_strides.row * size, p.query_strides.head * size});
  plan.cache_aligned = cache_is_aligned(p.key_cache, p.key_strides) &&
                       cache_is_aligned(p.value_cache, p.value_strides);
  plan.output_aligned =
      aligned_to(8, p.output, {p.output_strides.row * size, p.output_strides.head * size});
  return plan;
}

// Launched so that its start overlaps the end of the kernel before it.
template <typename T>
cudaError_t launch_combine(const PagedAttentionParams& p, int num_splits, int tile_m,
                           cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const int64_t items = static_cast<int64_t>(p.max_query_len) * p.num_heads;
  config.gridDim = dim3(static_cast<unsigned>(ceil_div64(items, kThreads / 32)), 1, p.num_reqs);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, combine_kernel<T>, p, num_splits, tile_m);
}

template <typename T, int D, int kWarpsM>
cudaError_t launch_tiles(const PagedAttentionParams& p, cudaStream_t stream) {
  using L = Tile<T, D, kWarpsM>;
  const auto kernel = paged_attention_kernel<T, D, kWarpsM>;
  const Plan plan = make_plan(p, L::kM);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSmemBytes);
  if (error != cudaSuccess) return error;
  const int64_t packed_rows =
      static_cast<int64_t>(p.max_query_len) * (p.num_heads / p.num_kv_heads);
  const dim3 grid(static_cast<unsigned>(ceil_div64(packed_rows, L::kM) * p.num_kv_heads),
                  plan.num_splits, p.num_reqs);
  kernel<<<grid, kThreads, L::kSmemBytes, stream>>>(p, plan);
  error = cudaGetLastError();
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<T>(p, plan.num_splits, L::kM, stream);
}

template <int D>
cudaError_t launch_fp32(const PagedAttentionParams& p, cudaStream_t stream) {
  constexpr int kWarps = kThreads / 32;
  const Plan plan = make_plan(p, kWarps);
  const int64_t items = static_cast<int64_t>(p.max_query_len) * p.num_heads;
  const dim3 grid(static_cast<unsigned>(ceil_div64(items, kWarps)), plan.num_splits, p.num_reqs);
  paged_attention_fp32_kernel<D><<<grid, kThreads, 0, stream>>>(p, plan);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || plan.num_splits == 1) return error;
  return launch_combine<float>(p, plan.num_splits, 1, stream);
}

template <typename T, int D>
cudaError_t launch_head_dim(const PagedAttentionParams& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    return launch_fp32<D>(p, stream);
  } else {
    const bool small = tile_m(p.num_heads, p.num_kv_heads, p.max_query_len) == 16;
    return small ? launch_tiles<T, D, 1>(p, stream) : launch_tiles<T, D, 4>(p, stream);
  }
}

template <typename T>
cudaError_t launch(const PagedAttentionParams& p, cudaStream_t stream) {
  switch (p.head_dim) {
    case 64: return launch_head_dim<T, 64>(p, stream);
    case 96: return launch_head_dim<T, 96>(p, stream);
    case 128: return launch_head_dim<T, 128>(p, stream);
    case 256: return launch_head_dim<T, 256>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_paged_attention(const PagedAttentionParams& params, cudaStream_t stream) {
  PagedAttentionParams p = params;
  p.max_query_len = std::min(p.max_query_len, p.num_rows);
  DFLASH_DISPATCH_FLOATING(p.dtype, return launch<scalar_t>(p, stream));
  return cudaErrorInvalidValue;
}

}  // namespace dflash
