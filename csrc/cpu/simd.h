// SPDX-License-Identifier: Apache-2.0
// What the CPU twins share: torch's thread pool and vector code for the processor at hand.
#pragma once

#ifndef DFLASH_WITHOUT_TORCH
#include <torch/csrc/stable/ops.h>
#endif

#include <cmath>
#include <cstdint>

#include "kernels/common/dtype.h"

// Compiles a function for AVX2 and for the baseline and chooses at load: the wheel runs on any x86-64. The loops
// inside must be plain enough for the compiler to vectorise. Not for templates: clone their non-template callers and
// mark what they call DFLASH_INLINE, so that it is inlined into each clone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DFLASH_CPU_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define DFLASH_CPU_CLONES
#endif
#define DFLASH_INLINE inline __attribute__((always_inline))

namespace dflash::cpu {

// exp(x) within 2 ulp by range reduction and a degree-5 polynomial (Cephes): plain arithmetic, so that loops over it
// vectorise. Saturates to [0, e^88].
DFLASH_INLINE float fast_exp(float x) {
  x = x < -87.33f ? -87.33f : (x > 88.0f ? 88.0f : x);
  const float n = std::floor(x * 1.44269504f + 0.5f);
  const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return y * bits_float(static_cast<uint32_t>((static_cast<int32_t>(n) + 127) << 23));
}

// fn(begin, end) over [0, count) on torch's threads; grain = the least work worth a thread. The GPU tests compare with
// the twins and link no torch (DFLASH_WITHOUT_TORCH): there one thread does all.
template <typename Fn>
void parallel_for(int64_t count, int64_t grain, const Fn& fn) {
  if (count <= 0) return;
#ifdef DFLASH_WITHOUT_TORCH
  static_cast<void>(grain);
  fn(int64_t{0}, count);
#else
  torch::stable::parallel_for(0, count, grain < 1 ? 1 : grain, fn);
#endif
}

}  // namespace dflash::cpu
