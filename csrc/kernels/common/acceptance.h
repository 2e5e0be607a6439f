// SPDX-License-Identifier: Apache-2.0
// The rules of rejection_sample, shared by the kernel and the CPU twin: which draft is accepted,
// and with what weight a token replaces a rejected one. p and q are the target's and the drafter's
// probabilities, u a uniform in (0, 1).
#pragma once

#include <cstdint>

#include "argmax.h"
#include "dtype.h"
#include "philox.h"

namespace dflash {

enum class RejectionMethod : int { kMatch, kStandard, kBlock, kSynthetic };

DFLASH_HOST_DEVICE bool is_greedy(float temperature) { return !(temperature > 0.0f); }

DFLASH_HOST_DEVICE bool is_token(int64_t id, int64_t vocab_size) {
  return id >= 0 && id < vocab_size;
}

// Noise of the token at `position`, whatever was drafted for it.
DFLASH_HOST_DEVICE NoiseKey target_noise(int64_t seed, int64_t position) {
  return NoiseKey{Stream::kTarget, 0, seed, position};
}

// Noise of draft i (from 0) of the block that starts after the anchor.
DFLASH_HOST_DEVICE NoiseKey block_noise(Stream stream, int64_t seed, int64_t anchor, int i) {
  return NoiseKey{stream, i + 1, seed, anchor};
}

DFLASH_HOST_DEVICE bool accepts_standard(float u, float p, float q) { return u * q < p; }

DFLASH_HOST_DEVICE bool accepts_synthetic(float u, float rate) { return u < rate; }

// Block verification (Sun et al., arXiv 2403.10444). P_i = min(P_{i-1} * p / q, 1): the probability
// that the first i drafts may be kept.
DFLASH_HOST_DEVICE float block_path(float path, float p, float q) {
  const float product = path * p;
  return product < q ? product / q : (product > 0.0f ? 1.0f : 0.0f);
}

// With excess = sum of max(P_i * p - q, 0) over the next token: draft i may end the block where its
// uniform lies below this; the last such i does.
DFLASH_HOST_DEVICE float block_threshold(float path, float excess) {
  const float all = excess + 1.0f - path;
  return all > 0.0f ? excess / all : 1.0f;
}

// The excess where the drafter is certain of a token whose target probability is p.
DFLASH_HOST_DEVICE float one_hot_excess(float path, float p) {
  return p < 1.0f ? path * (1.0f - p) : 0.0f;
}

// Unnormalised probability of a token in place of a rejected draft; standard: path is 1.
DFLASH_HOST_DEVICE float residual_weight(float path, float p, float q) {
  const float weight = path * p - q;
  return weight > 0.0f ? weight : 0.0f;
}

// The first maximum over tokens samples the residual: a race of exponentials, each as fast as its
// weight. Where rounding leaves no weight at all, every score is negative and the race samples p.
DFLASH_HOST_DEVICE float residual_score(float weight, float p, float exponential) {
  return weight > 0.0f ? weight / exponential : -exponential / p;
}

}  // namespace dflash
