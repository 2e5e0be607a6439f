// SPDX-License-Identifier: Apache-2.0
// Attention of ragged query rows over a paged cache, in one launch. The CTAs of a cluster share one
// tile of rows and deal its keys among themselves; lengths are read on the device, and a cluster
// without rows leaves. Bytes moved: visible K and V once a tile, query once a CTA, output once;
// between the CTAs of a cluster (D + 2) floats a row and split.
#include "paged_attention.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "common/attention_fp32.h"
#include "common/attention_mma.h"
#include "common/device.h"
#include "common/overlap.h"

namespace dflash {
namespace {

using namespace attention;

constexpr int kMaxWarpSplits = 16;
constexpr int kManyKeys = 16384, kLoneManyKeys = 32768;

int64_t ceil_div64(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool aligned_to(int64_t bytes, const void* pointer, std::initializer_list<int64_t> byte_strides) {
  bool aligned = reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
  for (int64_t stride : byte_strides) aligned = aligned && stride % bytes == 0;
  return aligned;
}

// CTAs of a cluster that give each SM one CTA, as far as there are keys for them.
template <typename L>
int few_ctas(const PagedAttentionParams& p, int64_t tiles) {
  const int most = std::min(kPortableCtas, kMaxWarpSplits / L::kWarpsN);
  // NOTE: warps of a lone CTA would send each other their splits; memcheck takes that for an error.
  int num_ctas = L::kWarpsN > 1 ? 2 : 1;
  while (num_ctas < most && 2 * num_ctas * tiles <= device_properties().num_sms &&
         num_ctas * L::kStepKeys < p.mask.max_keys) {
    num_ctas *= 2;
  }
  return num_ctas;
}

// Where a row may see many keys, what their meeting costs is repaid. Clusters of five lie well on
// the SMs, larger and even ones wait for each other there (docs/performance.md).
template <typename L>
int choose_num_ctas(const PagedAttentionParams& p, int64_t tiles) {
  const int64_t sms = device_properties().num_sms;
  const int num_ctas = few_ctas<L>(p, tiles);
  const int keys = p.mask.window_left < 0 ? p.mask.max_keys
                                          : std::min(p.mask.max_keys, p.mask.window_left);
  if (!L::kWgmma || keys < kManyKeys) return num_ctas;
  if (kMaxCtas * tiles <= sms) return keys < kLoneManyKeys ? num_ctas : kMaxCtas;
  return sms < 5 * tiles && 2 * tiles <= sms ? 5 : num_ctas;
}

// NOTE: every CTA merges rows: of 64, 12 CTAs would have none left for the last.
template <typename L>
void set_ctas(Plan& plan, int num_ctas) {
  plan.ctas = Divisor(num_ctas);
  plan.num_splits = num_ctas * L::kWarpsN;
  plan.share = (L::kM + num_ctas - 1) / num_ctas;
}

template <typename L>
Plan make_plan(const PagedAttentionParams& p) {
  const int64_t kv_size = p.kv_dtype == DType::kFloat8E4M3 ? 1 : 2;
  const auto cache_is_aligned = [kv_size](const void* cache, const CacheStrides& s) {
    return aligned_to(16, cache, {s.block * kv_size, s.offset * kv_size, s.head * kv_size});
  };
  const int64_t ratio = p.num_heads / p.num_kv_heads;
  const int64_t tiles =
      std::max<int64_t>(ceil_div64(p.num_rows * ratio, L::kM), std::min(p.num_rows, p.num_reqs)) *
      p.num_kv_heads;
  Plan plan;
  set_ctas<L>(plan, p.num_splits > 0 ? p.num_splits / L::kWarpsN : choose_num_ctas<L>(p, tiles));
  plan.ratio = Divisor(static_cast<int>(ratio));
  plan.page = Divisor(p.kv_block_size);
  plan.query_aligned = aligned_to(16, p.query, {p.query_strides.row * 2, p.query_strides.head * 2});
  plan.cache_aligned = cache_is_aligned(p.key_cache, p.key_strides) &&
                       cache_is_aligned(p.value_cache, p.value_strides);
  plan.output_aligned =
      aligned_to(16, p.output, {p.output_strides.row * 2, p.output_strides.head * 2});
  return plan;
}

// Whether this device runs a cluster larger than every device does.
template <typename Kernel>
bool has_room(const Kernel& kernel, const cudaLaunchConfig_t& config) {
  int num_clusters = 0;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (error != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();  // this answers it
  }
  return num_clusters > 0;
}

template <typename T, int D, int kWarpsM, bool kWgmma = false>
cudaError_t launch_tiles(const PagedAttentionParams& p, cudaStream_t stream) {
  using L = Tile<D, kWarpsM, kWgmma>;
  const auto kernel = p.kv_dtype == DType::kFloat8E4M3
                          ? paged_attention_kernel<T, D, kWarpsM, true, kWgmma>
                          : paged_attention_kernel<T, D, kWarpsM, false, kWgmma>;
  Plan plan = make_plan<L>(p);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, L::kSmemBytes);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2]{{}, overlap_attribute()};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = plan.num_ctas();
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  const int64_t packed_rows =
      static_cast<int64_t>(p.max_query_len) * (p.num_heads / p.num_kv_heads);
  const int64_t tiles = ceil_div64(packed_rows, L::kM);
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>(tiles * plan.num_ctas()), p.num_kv_heads, p.num_reqs);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = L::kSmemBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  if (plan.num_ctas() > kPortableCtas && !has_room(kernel, config)) {
    set_ctas<L>(plan, kPortableCtas);
    attributes[0].val.clusterDim.x = plan.num_ctas();
    config.gridDim.x = static_cast<unsigned>(tiles * plan.num_ctas());
  }
  return cudaLaunchKernelEx(&config, kernel, p, plan);
}

template <int D>
cudaError_t launch_fp32(const PagedAttentionParams& p, cudaStream_t stream) {
  const int64_t items = static_cast<int64_t>(p.max_query_len) * p.num_heads;
  const dim3 grid(static_cast<unsigned>(items), p.num_reqs);
  paged_attention_fp32_kernel<D><<<grid, 32 * kFp32Splits, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int D>
cudaError_t launch_head_dim(const PagedAttentionParams& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    return launch_fp32<D>(p, stream);
  } else {
    if constexpr (D == 64 || D == 128) {
      if (!p.portable && device_properties().major == 9)
        return launch_tiles<T, D, 4, true>(p, stream);
    }
    // A given number of splits is served by 64-row tiles alone, so that it names one order of sums.
    const int64_t packed_rows =
        static_cast<int64_t>(p.max_query_len) * (p.num_heads / p.num_kv_heads);
    if (packed_rows <= 16 && p.num_splits == 0) return launch_tiles<T, D, 1>(p, stream);
    return launch_tiles<T, D, 4>(p, stream);
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
