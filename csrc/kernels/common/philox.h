// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al., 2011) and the streams of the sampler. The integers are equal on host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtype.h"

namespace dflash {

struct Philox4 { uint32_t x[4]; };

DFLASH_HOST_DEVICE uint32_t mulhi32(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

DFLASH_HOST_DEVICE Philox4 philox4x32_10(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
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

// Streams that must never share noise. Target: position = the sampled token's, offset 0. The others: position = the
// anchor's, offset = 1..N, so that a position redrawn after a rejection gets fresh noise.
enum class Stream : uint32_t { kTarget = 0, kDraft = 1, kAcceptance = 2, kResidual = 3 };

// Four words for token indices 4 * quad .. 4 * quad + 3.
DFLASH_HOST_DEVICE Philox4 stream_words(Stream stream, int64_t seed, int64_t position, int offset, uint32_t quad) {
  const uint64_t where = static_cast<uint64_t>(position);
  return philox4x32_10(static_cast<uint64_t>(seed), quad, static_cast<uint32_t>(where),
                       (static_cast<uint32_t>(stream) << 24) | static_cast<uint32_t>(offset),
                       static_cast<uint32_t>(where >> 32));
}

// Uniform in (0, 1): 2^-33 .. 1 - 2^-24.
DFLASH_HOST_DEVICE float uniform_from_word(uint32_t word) {
  const float u = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;
  return u < 0.99999994f ? u : 0.99999994f;
}

// Standard exponential; precise near 0, where the winner of a race is decided.
DFLASH_HOST_DEVICE float exponential_from_word(uint32_t word) { return -log1pf(-uniform_from_word(word)); }

// Standard Gumbel: argmax(logit + gumbel) samples softmax(logit).
DFLASH_HOST_DEVICE float gumbel_from_word(uint32_t word) { return -logf(exponential_from_word(word)); }

DFLASH_HOST_DEVICE float stream_uniform(Stream stream, int64_t seed, int64_t position, int offset) {
  return uniform_from_word(stream_words(stream, seed, position, offset, 0).x[0]);
}

}  // namespace dflash
