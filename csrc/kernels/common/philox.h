// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., 2011) and the streams of the sampler. The integers are equal on
// host and device; the floats come from the same plain arithmetic and differ by fused multiply-adds
// at most.
#pragma once

#include <cstdint>

#include "dtype.h"

#if defined(__CUDA_ARCH__) || defined(__clang__)
#define DFLASH_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)
#define DFLASH_UNROLL
#else
#define DFLASH_UNROLL _Pragma("GCC unroll 16")
#endif

namespace dflash {

struct Philox4 {
  uint32_t x[4];
};

DFLASH_HOST_DEVICE uint32_t mulhi32(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

DFLASH_HOST_DEVICE Philox4 philox4x32_10(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2,
                                         uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  DFLASH_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = mulhi32(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
    const uint32_t high1 = mulhi32(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return Philox4{{c0, c1, c2, c3}};
}

// Streams that must never share noise. Target: position = the sampled token's, offset 0. The
// others: position = the anchor's, offset = 1..N, so that a position redrawn after a rejection gets
// fresh noise.
enum class Stream : uint32_t { kTarget = 0, kDraft = 1, kAcceptance = 2, kResidual = 3 };

// Where one draw stands: one word for every token index.
struct NoiseKey {
  Stream stream;
  int offset;
  int64_t seed;
  int64_t position;
};

// Four words, for token indices 4 * quad .. 4 * quad + 3.
DFLASH_HOST_DEVICE Philox4 stream_words(const NoiseKey& key, uint32_t quad) {
  const uint64_t position = static_cast<uint64_t>(key.position);
  return philox4x32_10(
      static_cast<uint64_t>(key.seed), quad, static_cast<uint32_t>(position),
      (static_cast<uint32_t>(key.stream) << 24) | static_cast<uint32_t>(key.offset),
      static_cast<uint32_t>(position >> 32));
}

DFLASH_HOST_DEVICE uint32_t stream_word(const NoiseKey& key, int64_t token) {
  const Philox4 words = stream_words(key, static_cast<uint32_t>(token >> 2));
  const uint32_t low = token & 1 ? words.x[1] : words.x[0];
  const uint32_t high = token & 1 ? words.x[3] : words.x[2];
  return token & 2 ? high : low;
}

// Uniform in (0, 1): 2^-33 .. 1 - 2^-24. The halves are converted apart because signed conversions
// vectorise; their sum is rounded once, as a direct conversion would be.
DFLASH_HOST_DEVICE float uniform_from_word(uint32_t word) {
  const float value = static_cast<float>(static_cast<int32_t>(word >> 16)) * 65536.0f +
                      static_cast<float>(static_cast<int32_t>(word & 0xffffu));
  const float u = (value + 0.5f) * 2.3283064365386963e-10f;
  return u < 0.99999994f ? u : 0.99999994f;
}

// x = 2^exponent * mantissa with mantissa in [sqrt(1/2), sqrt(2)), for a positive normal x.
struct SplitFloat {
  float exponent;
  float mantissa;
};

DFLASH_HOST_DEVICE SplitFloat split_float(float x) {
  constexpr int32_t kSqrtHalf = 0x3f3504f3;
  const int32_t above = static_cast<int32_t>(float_bits(x)) - kSqrtHalf;
  return SplitFloat{static_cast<float>(above >> 23),
                    bits_float(static_cast<uint32_t>((above & 0x007fffff) + kSqrtHalf))};
}

// exponent * log(2) + log(1 + x) within 2 ulp, 1 + x being a mantissa of split_float (coefficients:
// Cephes).
DFLASH_HOST_DEVICE float log_of_split(float exponent, float x) {
  const float z = x * x;
  float y = 7.0376836292e-2f;
  y = y * x - 1.1514610310e-1f;
  y = y * x + 1.1676998740e-1f;
  y = y * x - 1.2420140846e-1f;
  y = y * x + 1.4249322787e-1f;
  y = y * x - 1.6668057665e-1f;
  y = y * x + 2.0000714765e-1f;
  y = y * x - 2.4999993993e-1f;
  y = y * x + 3.3333331174e-1f;
  y = y * x * z - 2.12194440e-4f * exponent - 0.5f * z;
  return x + y + 0.693359375f * exponent;
}

// Standard exponential, -log(1 - u); precise near 0, where the winner of a race is decided.
DFLASH_HOST_DEVICE float exponential_from_word(uint32_t word) {
  const float u = uniform_from_word(word);
  const SplitFloat y = split_float(1.0f - u);
  // 1 - u drops low bits of a small u: there u itself is the argument.
  return -log_of_split(y.exponent, y.exponent == 0.0f ? -u : y.mantissa - 1.0f);
}

// Standard Gumbel: argmax(logit + gumbel) samples softmax(logit).
DFLASH_HOST_DEVICE float gumbel_from_word(uint32_t word) {
  const SplitFloat y = split_float(exponential_from_word(word));
  return -log_of_split(y.exponent, y.mantissa - 1.0f);
}

DFLASH_HOST_DEVICE float stream_uniform(const NoiseKey& key) {
  return uniform_from_word(stream_word(key, 0));
}

}  // namespace dflash
