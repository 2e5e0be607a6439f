// SPDX-License-Identifier: Apache-2.0
// sm_90 and later: barriers in shared memory, bulk tensor copies that complete on them, clusters.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace dflash {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// At the barrier of a CTA of the cluster.
// NOTE: publishes nothing beyond this CTA: only reads that are done (wgmma's) may come before it.
// With .release.cluster it is a fence over the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives and announces bytes that copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

#define DFLASH_MBARRIER_TRY_WAIT(done, barrier, parity, qualifiers)                     \
  asm volatile(                                                                         \
      "{\n"                                                                             \
      ".reg .pred p;\n"                                                                 \
      "mbarrier.try_wait.parity" qualifiers ".shared::cta.b64 p, [%1], %2;\n"           \
      "selp.u32 %0, 1, 0, p;\n"                                                         \
      "}\n"                                                                             \
      : "=r"(done)                                                                      \
      : "r"(barrier), "r"(parity)                                                       \
      : "memory")

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) DFLASH_MBARRIER_TRY_WAIT(done, barrier, parity, "");
}

// The same for what other CTAs of the cluster sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) DFLASH_MBARRIER_TRY_WAIT(done, barrier, parity, ".acquire.cluster");
}

#undef DFLASH_MBARRIER_TRY_WAIT

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;\n" : "=l"(policy));
  return policy;
}

// A box of the tensor into shared memory; what lies outside the tensor becomes zero.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap& map, uint32_t barrier,
                                         uint64_t policy, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3;\n" ::"r"(dst),
      "l"(&map), "r"(barrier), "l"(policy), "r"(c0), "r"(c1)
      : "memory");
}

// The same into every CTA of a pair, at the same place and on the same barrier of each.
__device__ __forceinline__ void tma_load_pair(uint32_t dst, const CUtensorMap& map,
                                              uint32_t barrier, uint64_t policy, int c0, int c1) {
  constexpr uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6}], [%2], %3, %4;\n" ::"r"(dst),
      "l"(&map), "r"(barrier), "h"(kBoth), "l"(policy), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load_pair(uint32_t dst, const CUtensorMap& map,
                                              uint32_t barrier, uint64_t policy, int c0, int c1,
                                              int c2, int c3) {
  constexpr uint16_t kBoth = 3;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%5, %6, %7, %8}], [%2], %3, %4;\n" ::"r"(dst),
      "l"(&map), "r"(barrier), "h"(kBoth), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap& map, uint32_t barrier,
                                         uint64_t policy, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;\n" ::"r"(dst),
      "l"(&map), "r"(barrier), "l"(policy), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Orders no memory: what came before it is done, or fenced.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}

__device__ __forceinline__ void cluster_wait_acquire() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// The address of the same place in the shared memory of the cluster's CTA `rank`.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Stores to a CTA of the cluster, whose `barrier` counts their bytes.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier,
                                            const float (&v)[4]) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%2, %3, %4, %5}, "
      "[%1];\n" ::"r"(address),
      "r"(barrier), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t address, uint32_t barrier, float x, float y) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, "
      "[%1];\n" ::"r"(address),
      "r"(barrier), "f"(x), "f"(y)
      : "memory");
}

__device__ __forceinline__ void load_shared_float4(float (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_shared_words(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}

// A barrier of `threads` threads; id 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.b32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(int{value})
      : "memory");
  return any != 0;
}

}  // namespace dflash
