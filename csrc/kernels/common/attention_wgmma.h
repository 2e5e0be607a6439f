// SPDX-License-Identifier: Apache-2.0
// sm_90a: a warpgroup's two products over 64 keys, A in registers (the same fragments as of
// mma.sync), B in shared memory in 128-byte swizzled blocks of 64 columns. A warp owns 16 of 64
// rows.
#pragma once

#include <type_traits>

#include "attention_tile.h"

namespace dflash::attention {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kDeviceHasWgmma = true;
#else
constexpr bool kDeviceHasWgmma = false;
#endif

constexpr int kWgmmaKeys = 64;

// Byte of a matrix of kWgmmaKeys rows: blocks of 128 columns of bytes, one after the other; within
// one, 16-byte chunks of a row are permuted by the row.
__device__ __forceinline__ uint32_t swizzled(int row, int column) {
  return (column >> 7) * (kWgmmaKeys * 128) + row * 128 + ((column & 127) ^ ((row & 7) << 4));
}

// 8 rows are 1024 bytes, the next 64 columns kWgmmaKeys * 128 bytes away.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1;
  return kSwizzle128 << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{kWgmmaKeys * 128 >> 4} << 16 |
         (address & 0x3ffff) >> 4;
}

// What this thread wrote to shared memory becomes visible to the matrix unit.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// s = q k^T and acc += p v: the first fills s, both are done on return.
template <typename T, int D>
__device__ __forceinline__ void group_query_key(float (&s)[8][4], const uint32_t (&q)[D / 16][4],
                                                uint32_t keys);
template <typename T, int D>
__device__ __forceinline__ void group_probability_value(float (&acc)[D / 8][4],
                                                        const float (&s)[8][4], uint32_t values);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_wait_all() {
  asm volatile(
      "wgmma.commit_group.sync.aligned;\n"
      "wgmma.wait_group.sync.aligned 0;\n" ::
          : "memory");
}

#define DFLASH_F4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define DFLASH_F16(x, n) \
  DFLASH_F4(x[n]), DFLASH_F4(x[n + 1]), DFLASH_F4(x[n + 2]), DFLASH_F4(x[n + 3])

// d = (accumulate ? d : 0) + a b; b is [64 columns, 16], with kTranspose = 1 [16, 64 columns].
#define DFLASH_WGMMA_64(type)                                                                     \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred p;\n"                                                                           \
      "setp.ne.b32 p, %37, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "   \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, "  \
      "%36, p, 1, 1, %38;\n"                                                                      \
      "}\n"                                                                                       \
      : DFLASH_F16(d, 0), DFLASH_F16(d, 4)                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}), "n"(kTranspose))

// d += a b; b is [16, 128 columns].
#define DFLASH_WGMMA_128(type)                                                                    \
  asm volatile(                                                                                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "   \
      "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, " \
      "%37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, " \
      "%55, %56, %57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"    \
      : DFLASH_F16(d, 0), DFLASH_F16(d, 4), DFLASH_F16(d, 8), DFLASH_F16(d, 12)                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <typename T, int kTranspose>
__device__ __forceinline__ void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    DFLASH_WGMMA_64("bf16");
  } else {
    DFLASH_WGMMA_64("f16");
  }
}

template <typename T, int kTranspose>
__device__ __forceinline__ void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b, bool) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    DFLASH_WGMMA_128("bf16");
  } else {
    DFLASH_WGMMA_128("f16");
  }
}

#undef DFLASH_WGMMA_64
#undef DFLASH_WGMMA_128
#undef DFLASH_F16
#undef DFLASH_F4

template <typename T, int D>
__device__ __forceinline__ void group_query_key(float (&s)[8][4], const uint32_t (&q)[D / 16][4],
                                                uint32_t keys) {
  const uint64_t b = matrix_descriptor(keys);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const int byte = k / 4 * (kWgmmaKeys * 128) + k % 4 * 32;
    wgmma<T, 0>(s, q[k], b + (byte >> 4), k > 0);
  }
  wgmma_wait_all();
}

template <typename T, int D>
__device__ __forceinline__ void group_probability_value(float (&acc)[D / 8][4],
                                                        const float (&s)[8][4], uint32_t values) {
  const uint64_t b = matrix_descriptor(values);
  uint32_t a[kWgmmaKeys / 16][4];
#pragma unroll
  for (int k = 0; k < kWgmmaKeys / 16; ++k) pack_probabilities<T>(a[k], s[2 * k], s[2 * k + 1]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWgmmaKeys / 16; ++k) wgmma<T, 1>(acc, a[k], b + (k * 2048 >> 4), true);
  wgmma_wait_all();
}

#endif

}  // namespace dflash::attention
