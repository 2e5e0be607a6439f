// SPDX-License-Identifier: Apache-2.0
// sm_90a: a warpgroup's product of two K-major matrices in shared memory, rows of 64 16-bit
// elements in 128-byte swizzled atoms of 8 rows. Warp w of the group owns rows 16 w .. of the 64;
// its fragments are those of mma.sync m16n8k16, one after the other along N.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtype.h"

namespace dflash {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of a matrix whose first row lies at a multiple of 1024 bytes; 8 rows are 1024 bytes.
__device__ __forceinline__ uint64_t swizzled_matrix(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1;
  constexpr uint64_t kRest = kSwizzle128 << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16;
  return kRest | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Until at most kPending of the newest groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

#define DFLASH_F8(n) \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), \
      "+f"(d[n + 1][1]), "+f"(d[n + 1][2]), "+f"(d[n + 1][3])
#define DFLASH_F16(n) DFLASH_F8(n), DFLASH_F8(n + 2)
#define DFLASH_F32(n) DFLASH_F16(n), DFLASH_F16(n + 4)
#define DFLASH_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DFLASH_R16 DFLASH_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DFLASH_R32 \
  DFLASH_R16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DFLASH_R64                                                                   \
  DFLASH_R32                                                                         \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DFLASH_WGMMA(n, type, registers, a_at, b_at, ...)                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {"     \
               registers "}, %" a_at ", %" b_at ", 1, 1, 1, 0, 0;\n"                    \
               : __VA_ARGS__                                                           \
               : "l"(a), "l"(b))
#define DFLASH_WGMMA_OF(n, registers, a_at, b_at, ...)             \
  if constexpr (std::is_same_v<T, BFloat16>) {                     \
    DFLASH_WGMMA(n, "bf16", registers, a_at, b_at, __VA_ARGS__);   \
  } else {                                                         \
    DFLASH_WGMMA(n, "f16", registers, a_at, b_at, __VA_ARGS__);    \
  }

#define DFLASH_WGMMA_REGISTERS(n, type, registers, a0, a1, a2, a3, b_at, ...)           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {"     \
               registers "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_at             \
               ", 1, 1, 1, 0;\n"                                                       \
               : __VA_ARGS__                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#define DFLASH_WGMMA_REGISTERS_OF(n, registers, a0, a1, a2, a3, b_at, ...)                     \
  if constexpr (std::is_same_v<T, BFloat16>) {                                                \
    DFLASH_WGMMA_REGISTERS(n, "bf16", registers, a0, a1, a2, a3, b_at, __VA_ARGS__);          \
  } else {                                                                                    \
    DFLASH_WGMMA_REGISTERS(n, "f16", registers, a0, a1, a2, a3, b_at, __VA_ARGS__);           \
  }

// d [64, N] += a [64, 16] b [N, 16]^T, asynchronously.
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[2][4], uint64_t a, uint64_t b) {
  DFLASH_WGMMA_OF("16", DFLASH_R8, "8", "9", DFLASH_F8(0));
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[4][4], uint64_t a, uint64_t b) {
  DFLASH_WGMMA_OF("32", DFLASH_R16, "16", "17", DFLASH_F16(0));
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[8][4], uint64_t a, uint64_t b) {
  DFLASH_WGMMA_OF("64", DFLASH_R32, "32", "33", DFLASH_F32(0));
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[16][4], uint64_t a, uint64_t b) {
  DFLASH_WGMMA_OF("128", DFLASH_R64, "64", "65", DFLASH_F32(0), DFLASH_F32(8));
}

// The same with a as a warp's fragment of mma.sync m16n8k16, which must stay until it is done.
template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b) {
  DFLASH_WGMMA_REGISTERS_OF("16", DFLASH_R8, "8", "9", "10", "11", "12", DFLASH_F8(0));
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
  DFLASH_WGMMA_REGISTERS_OF("32", DFLASH_R16, "16", "17", "18", "19", "20", DFLASH_F16(0));
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  DFLASH_WGMMA_REGISTERS_OF("64", DFLASH_R32, "32", "33", "34", "35", "36", DFLASH_F32(0));
}

template <typename T>
__device__ __forceinline__ void wgmma(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  DFLASH_WGMMA_REGISTERS_OF("128", DFLASH_R64, "64", "65", "66", "67", "68", DFLASH_F32(0),
                            DFLASH_F32(8));
}

#undef DFLASH_WGMMA_REGISTERS_OF
#undef DFLASH_WGMMA_REGISTERS
#undef DFLASH_WGMMA_OF
#undef DFLASH_WGMMA
#undef DFLASH_R64
#undef DFLASH_R32
#undef DFLASH_R16
#undef DFLASH_R8
#undef DFLASH_F32
#undef DFLASH_F16
#undef DFLASH_F8

#endif

}  // namespace dflash
