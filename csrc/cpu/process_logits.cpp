// SPDX-License-Identifier: Apache-2.0
// A row is written once in full; where a part of it is kept, bins of its logits show in which bin
// the kept part ends, and only that bin's logits are sorted.
#include "kernels/process_logits.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "vocabulary.h"

namespace dflash::cpu {
namespace {

struct TokenLogit {
  int64_t token;
  float logit;
};

// The logits of the tokens that the row's lists name. Read before the row is written: it may be
// written in place.
std::vector<TokenLogit> listed_logits(const LogitRules& r, const LogitsRow& row,
                                      int64_t vocab_size) {
  std::vector<TokenLogit> listed;
  const auto list = [&](const int64_t* ids, int count) {
    for (int k = 0; k < count; ++k) {
      if (!is_token(ids[k], vocab_size)) continue;
      listed.push_back({ids[k], listed_logit(r, ids[k], logit_at(row, ids[k]))});
    }
  };
  list(r.bias_ids, r.num_bias);
  list(r.banned_ids, r.num_banned);
  list(r.drafts, r.num_drafts);
  return listed;
}

DFLASH_INLINE bool counts_any(const int32_t* counts, int64_t count) {
  int32_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= counts[i];
  return any != 0;
}

// Few tokens of a vocabulary have a count.
DFLASH_INLINE void penalize_tile(const LogitRules& r, const int32_t* counts, int64_t count,
                                 float* x) {
  for (int64_t begin = 0; begin < count; begin += kLanes) {
    const int64_t n = std::min(kLanes, count - begin);
    if (!counts_any(counts + begin, n)) continue;
    for (int64_t i = begin; i < begin + n; ++i)
      x[i] = penalize(r, x[i], static_cast<uint32_t>(counts[i]));
  }
}

DFLASH_CPU_CLONES void write_row(const LogitRules& r, const LogitsRow& row, int64_t vocab_size,
                                 float* out) {
  alignas(64) float x[kTile];
  const LogitRules rules = r;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    load_tile(row, begin, count, x);
    if (rules.counts != nullptr) penalize_tile(rules, rules.counts + begin, count, x);
    for (int64_t i = 0; i < count; ++i) out[begin + i] = scale_logit(rules, x[i]);
  }
}

DFLASH_CPU_CLONES float row_max(const LogitsRow& row, int64_t vocab_size) {
  alignas(64) float x[kTile];
  float max = kNegativeInfinity;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    load_tile(row, begin, count, x);
    max = std::max(max, tile_max(x, round_to_lanes(count)));
  }
  return max;
}

// What decides how much is kept: x is kept where the strictly larger kept logits weigh less than
// the target. top_k weighs each 1 and has k as target, top_p weighs it exp(x - max) and has a share
// of the whole.
struct Cut {
  bool by_mass;
  double amount;  // k, or p
};

double weight(const Cut& cut, const KeptLogits& kept, float x) {
  return cut.by_mass ? static_cast<double>(exp_or_zero(x - kept.max)) : 1.0;
}

DFLASH_CPU_CLONES void fill_bins(const Cut& cut, const KeptLogits& kept, const float* row,
                                 int64_t vocab_size, double* bins) {
  alignas(64) float x[kTile];
  alignas(64) float w[kTile];
  alignas(64) int bin[kTile];
  const KeptLogits k = kept;
  const bool by_mass = cut.by_mass;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    for (int64_t i = 0; i < count; ++i) x[i] = row[begin + i];
    for (int64_t i = 0; i < count; ++i) w[i] = by_mass ? exp_or_zero(x[i] - k.max) : 1.0f;
    for (int64_t i = 0; i < count; ++i) w[i] = k(x[i]) ? w[i] : 0.0f;
    for (int64_t i = 0; i < count; ++i) bin[i] = logit_bin(k.max, x[i]);
    for (int64_t i = 0; i < count; ++i) bins[bin[i]] += static_cast<double>(w[i]);
  }
}

std::vector<float> logits_of_bin(const KeptLogits& kept, const float* row, int64_t vocab_size,
                                 int bin) {
  std::vector<float> x;
  for (int64_t i = 0; i < vocab_size; ++i) {
    if (kept(row[i]) && logit_bin(kept.max, row[i]) == bin) x.push_back(row[i]);
  }
  return x;
}

// The least logit that the cut keeps.
float least_kept(const Cut& cut, const KeptLogits& kept, const float* row, int64_t vocab_size) {
  double bins[kLogitBins] = {};
  fill_bins(cut, kept, row, vocab_size, bins);
  double total = 0.0;
  for (double b : bins) total += b;
  const double target = cut.by_mass ? cut.amount * total : cut.amount;
  double larger = 0.0;
  int bin = 0;
  while (bin < kLogitBins && larger + bins[bin] < target) larger += bins[bin++];
  if (bin == kLogitBins) return kept.least;

  std::vector<float> x = logits_of_bin(kept, row, vocab_size, bin);
  std::sort(x.begin(), x.end(), std::greater<float>());
  // The maximum is kept whatever the target.
  float least = bin == 0 ? kept.max : kept.least;
  for (size_t i = 0; i < x.size() && larger < target;) {
    least = x[i];
    for (; i < x.size() && x[i] == least; ++i) larger += weight(cut, kept, least);
  }
  return least;
}

DFLASH_CPU_CLONES void drop_rest(const KeptLogits& kept, int64_t vocab_size, float* row) {
  const KeptLogits k = kept;
  for (int64_t i = 0; i < vocab_size; ++i) row[i] = k(row[i]) ? row[i] : kNegativeInfinity;
}

void select(const LogitRules& r, int64_t vocab_size, float* row) {
  const float max = row_max(LogitsRow{row, DType::kFloat32, 1.0f}, vocab_size);
  if (!(max > kNegativeInfinity)) return;
  KeptLogits kept = kept_by_min_p(max, r.min_p);
  if (r.top_k > 0) kept.least = least_kept(Cut{false, double(r.top_k)}, kept, row, vocab_size);
  if (r.top_p < 1.0f) kept.least = least_kept(Cut{true, r.top_p}, kept, row, vocab_size);
  drop_rest(kept, vocab_size, row);
}

// The request that owns the row: the last that starts at or before it.
int64_t request_of(const ProcessLogitsParams& p, int64_t row) {
  const int32_t* starts = p.logits_start_loc;
  return std::upper_bound(starts, starts + p.num_reqs, row) - starts - 1;
}

void process_row(const ProcessLogitsParams& p, int64_t row) {
  const int64_t req = request_of(p, row);
  if (req < 0) return;
  const LogitRules r = logit_rules(p, row, req);
  if (r.state < 0) return;
  const LogitsRow in{element(p.logits, p.dtype, row * p.logits_stride), p.dtype, 1.0f};
  float* out = p.output + row * p.output_stride;
  const std::vector<TokenLogit> listed = listed_logits(r, in, p.vocab_size);
  write_row(r, in, p.vocab_size, out);
  for (const TokenLogit& t : listed) out[t.token] = t.logit;
  if (r.selects()) select(r, p.vocab_size, out);
}

}  // namespace

void process_logits(const ProcessLogitsParams& params) {
  const int64_t owned = params.logits_start_loc[params.num_reqs];
  parallel_for(std::min(owned, params.num_rows), 1 + 65536 / params.vocab_size,
               [&](int64_t begin, int64_t end) {
                 for (int64_t row = begin; row < end; ++row) process_row(params, row);
               });
}

}  // namespace dflash::cpu
