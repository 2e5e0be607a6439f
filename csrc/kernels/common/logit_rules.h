// SPDX-License-Identifier: Apache-2.0
// The rules of process_logits, shared by the kernel and the CPU twin: what becomes of one logit,
// and how a row's logits are ordered and weighed where a part of them is kept.
#pragma once

#include <cmath>
#include <cstdint>

#include "acceptance.h"
#include "argmax.h"
#include "dtype.h"
#include "logits.h"

namespace dflash {

// token_counts: bit 31 = in the prompt, the rest = times generated.
inline constexpr uint32_t kTimesGenerated = 0x7fffffffu;

// What one row is processed with. A pointer is null, a count 0, where the row has no use for it.
struct LogitRules {
  int64_t state;            // -1: the row is not written
  const int64_t* drafts;    // generated too: d_1 .. d_i of row i
  const int32_t* counts;    // [vocab_size], null: no penalty
  const int64_t* bias_ids;  // -1 = unused
  const float* bias;
  const int64_t* banned_ids;  // -1 = unused
  int num_drafts;
  int num_bias;
  int num_banned;
  float repetition;
  float frequency;
  float presence;
  float temperature;
  int top_k;    // 0 = off
  float top_p;  // 1 = off
  float min_p;  // 0 = off

  DFLASH_HOST_DEVICE bool selects() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

// `count` is an entry of token_counts.
DFLASH_HOST_DEVICE float penalize(const LogitRules& r, float x, uint32_t count) {
  if (count == 0) return x;
  const uint32_t generated = count & kTimesGenerated;
  x = x > 0.0f ? x / r.repetition : x * r.repetition;
  x -= r.frequency * static_cast<float>(generated);
  return generated > 0 ? x - r.presence : x;
}

// Products and sums can leave the floats, as logits can come: cleaned again.
DFLASH_HOST_DEVICE float scale_logit(const LogitRules& r, float x) {
  return clean_logit(is_greedy(r.temperature) ? x : clean_logit(x) / r.temperature);
}

// The logit of a token that no list of the row names.
DFLASH_HOST_DEVICE float ordinary_logit(const LogitRules& r, float raw, uint32_t count) {
  return scale_logit(r, penalize(r, clean_logit(raw), count));
}

// The logit of any token. Ids given twice add up.
DFLASH_HOST_DEVICE float listed_logit(const LogitRules& r, int64_t token, float raw) {
  float x = clean_logit(raw);
  for (int k = 0; k < r.num_bias; ++k) {
    if (r.bias_ids[k] == token) x += r.bias[k];
  }
  for (int k = 0; k < r.num_banned; ++k) {
    if (r.banned_ids[k] == token) x = kNegativeInfinity;
  }
  uint32_t count = r.counts != nullptr ? static_cast<uint32_t>(r.counts[token]) : 0;
  for (int i = 0; i < r.num_drafts; ++i) count += r.drafts[i] == token ? 1 : 0;
  return scale_logit(r, penalize(r, clean_logit(x), count));
}

// What is kept of a row: x with x - max >= floor and x >= least.
struct KeptLogits {
  float max;
  float floor;
  float least;

  DFLASH_HOST_DEVICE bool operator()(float x) const {
    return x > kNegativeInfinity && x - max >= floor && x >= least;
  }
};

DFLASH_HOST_DEVICE KeptLogits kept_by_min_p(float max, float min_p) {
  // The double's logarithm rounds to the same float on host and device.
  const float floor = min_p > 0.0f ? static_cast<float>(log(static_cast<double>(min_p)))
                                   : kNegativeInfinity;
  return KeptLogits{max, floor < 0.0f ? floor : 0.0f, kNegativeInfinity};
}

// Bins of a row's logits by their distance from the maximum: ascending bins hold descending logits.
inline constexpr int kLogitBins = 1024;
inline constexpr float kLogitBinsPerUnit = 32.0f;

DFLASH_HOST_DEVICE int logit_bin(float max, float x) {
  const float bin = (max - x) * kLogitBinsPerUnit;
  return bin < static_cast<float>(kLogitBins - 1) ? static_cast<int>(bin) : kLogitBins - 1;
}

}  // namespace dflash
