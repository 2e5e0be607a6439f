// SPDX-License-Identifier: Apache-2.0
// A request is verified in order and stops at its first rejection: later rows are never read.
#include "kernels/rejection_sample.h"

#include "vocabulary.h"

namespace dflash::cpu {
namespace {

struct Outcome {
  int accepted;
  int64_t token;
};

struct Buffers {
  alignas(64) float p[kTile];
  alignas(64) float q[kTile];
  alignas(64) uint32_t words[kTile];
};

// The row's argmax, or its Gumbel-max sample where there is noise.
DFLASH_CPU_CLONES int64_t choose(const LogitsRow& row, int64_t vocab_size, const NoiseKey* noise) {
  Buffers b;
  FirstMaximum best;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    load_tile(row, begin, count, b.p);
    if (noise != nullptr) {
      load_words(*noise, begin, count, b.words);
      for (int64_t i = 0; i < count; ++i) b.p[i] += gumbel_from_word(b.words[i]);
    }
    update(best, b.p, begin, round_to_lanes(count));
  }
  return best.index;
}

DFLASH_CPU_CLONES Softmax softmax_of(const LogitsRow& row, int64_t vocab_size) {
  Buffers b;
  float max = kNegativeInfinity;
  double sum = 0.0;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    const int64_t padded = round_to_lanes(count);
    load_tile(row, begin, count, b.p);
    const float before = max;
    const float here = tile_max(b.p, padded);
    max = here > max ? here : max;
    const float origin = softmax_origin(max);
    sum *= exp_or_zero(before - origin);
    for (int64_t i = 0; i < padded; ++i) b.p[i] = exp_or_zero(b.p[i] - origin);
    sum += tile_sum(b.p, padded);
  }
  return Softmax{softmax_origin(max), sum > 0.0 ? static_cast<float>(1.0 / sum) : 0.0f};
}

float probability(const LogitsRow& row, const Softmax& s, int64_t token) {
  return exp_or_zero(logit_at(row, token) - s.max) * s.inv_sum;
}

DFLASH_INLINE void load_probabilities(const LogitsRow& row, const Softmax& s, int64_t begin,
                                      int64_t count, float* out) {
  load_tile(row, begin, count, out);
  const float max = s.max, inv_sum = s.inv_sum;
  for (int64_t i = 0; i < round_to_lanes(count); ++i) out[i] = exp_or_zero(out[i] - max) * inv_sum;
}

// What a draft is verified against: the target's row and the drafter's, absent where it is one-hot
// at the draft.
struct Pair {
  LogitsRow p_row, q_row;
  Softmax p_softmax, q_softmax;
  int64_t draft;
  bool one_hot;
};

Pair make_pair(const RejectionSampleParams& p, const VerifiedRequest& r, int i) {
  Pair pair{};
  pair.p_row = target_row(p, r, i);
  pair.p_softmax = softmax_of(pair.p_row, p.vocab_size);
  pair.draft = r.drafts[i];
  pair.one_hot = p.draft_logits == nullptr;
  if (pair.one_hot) return pair;
  pair.q_row = drafter_row(p, r, i);
  pair.q_softmax = softmax_of(pair.q_row, p.vocab_size);
  return pair;
}

float p_of_draft(const Pair& pair) { return probability(pair.p_row, pair.p_softmax, pair.draft); }

float q_of_draft(const Pair& pair) {
  return pair.one_hot ? 1.0f : probability(pair.q_row, pair.q_softmax, pair.draft);
}

DFLASH_INLINE void load_pair(const Pair& pair, int64_t begin, int64_t count, Buffers& b) {
  load_probabilities(pair.p_row, pair.p_softmax, begin, count, b.p);
  if (!pair.one_hot) return load_probabilities(pair.q_row, pair.q_softmax, begin, count, b.q);
  for (int64_t i = 0; i < round_to_lanes(count); ++i)
    b.q[i] = begin + i == pair.draft ? 1.0f : 0.0f;
}

// Sum of max(path * p - q, 0).
DFLASH_CPU_CLONES float excess_of(const Pair& pair, float path, int64_t vocab_size) {
  if (pair.one_hot) return one_hot_excess(path, p_of_draft(pair));
  Buffers b;
  double sum = 0.0;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    load_pair(pair, begin, count, b);
    for (int64_t i = 0; i < round_to_lanes(count); ++i)
      b.p[i] = residual_weight(path, b.p[i], b.q[i]);
    sum += tile_sum(b.p, round_to_lanes(count));
  }
  return static_cast<float>(sum);
}

DFLASH_CPU_CLONES int64_t choose_residual(const Pair& pair, float path, const NoiseKey& noise,
                                          int64_t vocab_size) {
  Buffers b;
  FirstMaximum best;
  for (int64_t begin = 0; begin < vocab_size; begin += kTile) {
    const int64_t count = tile_size(vocab_size, begin);
    const int64_t padded = round_to_lanes(count);
    load_pair(pair, begin, count, b);
    load_words(noise, begin, count, b.words);
    for (int64_t i = 0; i < padded; ++i) {
      const float weight = residual_weight(path, b.p[i], b.q[i]);
      b.q[i] = residual_score(weight, b.p[i], exponential_from_word(b.words[i]));
    }
    update(best, b.q, begin, padded);
  }
  return best.index;
}

int64_t choose_row(const RejectionSampleParams& p, const VerifiedRequest& r, int i) {
  if (p.target_tokens != nullptr) return p.target_tokens[r.first_row + i];
  const NoiseKey noise = row_noise(p, r, i);
  return choose(target_row(p, r, i), p.vocab_size, r.sampled() ? &noise : nullptr);
}

Outcome replace(const RejectionSampleParams& p, const VerifiedRequest& r, const Pair& pair,
                float path, int i) {
  return Outcome{i, choose_residual(pair, path, block_noise(Stream::kResidual, r.seed, r.anchor, i),
                                    p.vocab_size)};
}

Outcome verify_by_choice(const RejectionSampleParams& p, const VerifiedRequest& r) {
  for (int i = 0;; ++i) {
    const int64_t token = choose_row(p, r, i);
    if (i == r.num_drafts || token != r.drafts[i]) return Outcome{i, token};
  }
}

Outcome verify_synthetic(const RejectionSampleParams& p, const VerifiedRequest& r) {
  int i = 0;
  while (i < r.num_drafts && accepts_synthetic(acceptance_uniform(r, i), p.synthetic_rates[i])) ++i;
  return Outcome{i, choose_row(p, r, i)};
}

Outcome verify_standard(const RejectionSampleParams& p, const VerifiedRequest& r) {
  for (int i = 0; i < r.num_drafts; ++i) {
    const Pair pair = make_pair(p, r, i);
    if (!accepts_standard(acceptance_uniform(r, i), p_of_draft(pair), q_of_draft(pair))) {
      return replace(p, r, pair, 1.0f, i);
    }
  }
  return Outcome{r.num_drafts, choose_row(p, r, r.num_drafts)};
}

Outcome verify_block(const RejectionSampleParams& p, const VerifiedRequest& r) {
  if (r.num_drafts == 0) return Outcome{0, choose_row(p, r, 0)};
  Pair pair = make_pair(p, r, 0), last = pair;
  float path = 1.0f, last_path = 1.0f;
  int accepted = 0;
  for (int i = 0; i < r.num_drafts; ++i) {
    path = block_path(path, p_of_draft(pair), q_of_draft(pair));
    const bool ends = i + 1 == r.num_drafts;
    if (!ends) pair = make_pair(p, r, i + 1);
    const float threshold =
        ends ? path : block_threshold(path, excess_of(pair, path, p.vocab_size));
    if (!(acceptance_uniform(r, i) < threshold)) continue;
    accepted = i + 1;
    last = pair;
    last_path = path;
  }
  if (accepted == r.num_drafts) return Outcome{accepted, choose_row(p, r, accepted)};
  return replace(p, r, last, last_path, accepted);
}

Outcome verify(const RejectionSampleParams& p, const VerifiedRequest& r) {
  if (p.method == RejectionMethod::kSynthetic) return verify_synthetic(p, r);
  if (!r.sampled() || p.method == RejectionMethod::kMatch) return verify_by_choice(p, r);
  return p.method == RejectionMethod::kStandard ? verify_standard(p, r) : verify_block(p, r);
}

void commit(const RejectionSampleParams& p, const VerifiedRequest& r, const Outcome& outcome,
            int64_t req) {
  int64_t* tokens = p.sampled_token_ids + req * p.sampled_token_ids_stride;
  int n = commit_limit(p, r, outcome.accepted);
  for (int i = 0; i < n; ++i) {
    tokens[i] = i < outcome.accepted ? r.drafts[i] : outcome.token;
    if (is_stop_token(p, r.state, tokens[i])) n = i + 1;
  }
  for (int i = n; i <= p.max_drafts; ++i) tokens[i] = -1;
  p.num_sampled[req] = n;
  p.num_rejected[req] = r.num_rows - n;
}

void sample_request(const RejectionSampleParams& p, int64_t req) {
  VerifiedRequest r = verified_request(p, req);
  int valid = 0;
  while (valid < r.num_drafts && is_token(r.drafts[valid], p.vocab_size)) ++valid;
  r.num_drafts = valid;
  const bool nothing = commit_limit(p, r, 0) == 0;
  commit(p, r, nothing ? Outcome{0, -1} : verify(p, r), req);
}

}  // namespace

void rejection_sample(const RejectionSampleParams& params) {
  const int64_t work = params.vocab_size * (params.max_drafts + 1);
  parallel_for(params.num_reqs, 1 + 65536 / work, [&](int64_t begin, int64_t end) {
    for (int64_t req = begin; req < end; ++req) sample_request(params, req);
  });
}

}  // namespace dflash::cpu
