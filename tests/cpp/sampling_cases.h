// SPDX-License-Identifier: Apache-2.0
// Random batches of the two samplers in host memory and what must come of them, in double: shared
// by the tests of the CPU twins and of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/rejection_sample.h"
#include "kernels/sample_draft.h"

namespace dflash::testing {

using Row = std::vector<double>;

inline int64_t first_argmax(const Row& row) {
  return std::max_element(row.begin(), row.end()) - row.begin();
}

inline double exponential(const NoiseKey& key, int64_t token) {
  return -std::log1p(-static_cast<double>(uniform_from_word(stream_word(key, token))));
}

inline int64_t gumbel_argmax(Row row, const NoiseKey& key) {
  for (size_t v = 0; v < row.size(); ++v)
    row[v] -= std::log(exponential(key, static_cast<int64_t>(v)));
  return first_argmax(row);
}

inline Row softmax(const Row& row) {
  const double max = *std::max_element(row.begin(), row.end());
  double sum = 0.0;
  Row p;
  for (double x : row) p.push_back(std::exp(x - max));
  for (double x : p) sum += x;
  for (double& x : p) x /= sum;
  return p;
}

inline std::vector<float> random_logits(std::mt19937& rng, int64_t count) {
  std::normal_distribution<float> normal(0.0f, 2.0f);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& v : x) v = normal(rng);
  return x;
}

inline float temperature_of(int64_t state) {
  constexpr float kTemperatures[] = {0.0f, 1.0f, 0.7f, 1.6f};
  return kTemperatures[state % 4];
}

// Requests 0 .. R - 1 on states 1 .. R, request r with r % (N + 2) rows; the last request is
// padded.
struct RejectionCase {
  int64_t num_reqs, num_states, vocab_size;
  int max_drafts;
  std::vector<float> target_logits, draft_logits, temperatures, rates;
  std::vector<int32_t> start_loc, idx_mapping, num_draft_tokens, tokens_left;
  std::vector<int64_t> positions, draft_tokens, seeds, stop_token_ids;

  RejectionCase(int64_t reqs, int drafts, int64_t vocab, unsigned seed)
      : num_reqs(reqs), num_states(reqs + 1), vocab_size(vocab), max_drafts(drafts) {
    std::mt19937 rng(seed);
    const auto random = [&](int64_t low, int64_t high) {
      return std::uniform_int_distribution<int64_t>(low, high)(rng);
    };
    start_loc.push_back(0);
    for (int64_t r = 0; r < reqs; ++r) {
      idx_mapping.push_back(r + 1 == reqs ? -1 : static_cast<int32_t>(r) + 1);
      start_loc.push_back(start_loc.back() + static_cast<int32_t>(r % (drafts + 2)));
    }
    target_logits = random_logits(rng, start_loc.back() * vocab);
    draft_logits = random_logits(rng, num_states * drafts * vocab);
    for (int32_t i = 0; i < start_loc.back(); ++i) positions.push_back(random(0, 9999));
    for (int64_t s = 0; s < num_states; ++s) {
      temperatures.push_back(temperature_of(s));
      seeds.push_back(random(-(int64_t{1} << 62), int64_t{1} << 62));
      num_draft_tokens.push_back(static_cast<int32_t>(random(drafts / 2, drafts)));
      tokens_left.push_back(s % 5 == 4 ? static_cast<int32_t>(random(-1, drafts)) : 1000);
      stop_token_ids.push_back(s % 3 ? random(0, vocab - 1) : -1);
      for (int i = 0; i < drafts; ++i)
        draft_tokens.push_back(likely_draft(s - 1, i, random(-1, vocab - 1)));
    }
    for (int i = 0; i < drafts; ++i) rates.push_back(0.5f + 0.1f * static_cast<float>(i % 4));
  }

  // Mostly the target's argmax, so that blocks are accepted in part and in full.
  int64_t likely_draft(int64_t req, int i, int64_t other) const {
    if (req < 0 || req >= num_reqs || start_loc[req] + i >= start_loc[req + 1] || other % 3 == 0)
      return other;
    return first_argmax(target_row(start_loc[req] + i));
  }

  Row target_row(int64_t row) const {
    const auto begin = target_logits.begin() + row * vocab_size;
    return Row(begin, begin + vocab_size);
  }

  Row drafter_probabilities(int64_t state, int i, bool recorded) const {
    Row q(static_cast<size_t>(vocab_size), 0.0);
    if (!recorded) {
      q[static_cast<size_t>(draft_tokens[state * max_drafts + i])] = 1.0;
      return q;
    }
    const float* logits = draft_logits.data() + (state * max_drafts + i) * vocab_size;
    for (int64_t v = 0; v < vocab_size; ++v)
      q[v] = logits[v] / static_cast<double>(temperatures[state]);
    return softmax(q);
  }

  // Sizes, strides and the method; the pointers are the caller's.
  RejectionSampleParams params(RejectionMethod method) const {
    RejectionSampleParams p{};
    p.num_reqs = num_reqs;
    p.num_states = num_states;
    p.vocab_size = vocab_size;
    p.target_logits_stride = vocab_size;
    p.draft_tokens_stride = max_drafts;
    p.draft_logits_strides[0] = max_drafts * vocab_size;
    p.draft_logits_strides[1] = vocab_size;
    p.stop_token_ids_stride = 1;
    p.sampled_token_ids_stride = max_drafts + 1;
    p.max_drafts = max_drafts;
    p.num_stop_ids = 1;
    p.method = method;
    return p;
  }

  // What every row samples; rows of padded requests hold no token.
  std::vector<int64_t> target_tokens() const;

  // Tokens to commit for a request.
  std::vector<int64_t> expected(int64_t req, RejectionMethod method, bool recorded) const;
};

namespace oracle {

struct Verifier {
  const RejectionCase& c;
  int64_t state, first_row;
  bool recorded;
  std::vector<int64_t> drafts;

  bool greedy() const { return c.temperatures[state] == 0.0f; }

  int64_t choice(int i) const {
    const Row row = c.target_row(first_row + i);
    if (greedy()) return first_argmax(row);
    return gumbel_argmax(
        row, NoiseKey{Stream::kTarget, 0, c.seeds[state], c.positions[first_row + i] + 1});
  }

  NoiseKey key(Stream stream, int i) const {
    return NoiseKey{stream, i + 1, c.seeds[state], c.positions[first_row]};
  }

  double uniform(int i) const {
    return uniform_from_word(stream_word(key(Stream::kAcceptance, i), 0));
  }

  Row residual(int i, double path) const {
    Row w = softmax(c.target_row(first_row + i));
    const Row q = c.drafter_probabilities(state, i, recorded);
    for (size_t v = 0; v < w.size(); ++v) w[v] = std::fmax(path * w[v] - q[v], 0.0);
    return w;
  }

  int64_t replacement(int i, double path) const {
    Row w = residual(i, path);
    for (size_t v = 0; v < w.size(); ++v)
      w[v] /= exponential(key(Stream::kResidual, i), static_cast<int64_t>(v));
    return first_argmax(w);
  }

  double ratio(int i) const {
    const size_t d = static_cast<size_t>(drafts[i]);
    return softmax(c.target_row(first_row + i))[d] / c.drafter_probabilities(state, i, recorded)[d];
  }

  std::vector<int64_t> ending(int accepted, int64_t token) const {
    std::vector<int64_t> tokens(drafts.begin(), drafts.begin() + accepted);
    tokens.push_back(token);
    return tokens;
  }

  std::vector<int64_t> verify(RejectionMethod method) const {
    const int n = static_cast<int>(drafts.size());
    if (method == RejectionMethod::kSynthetic) {
      int a = 0;
      while (a < n && uniform(a) < c.rates[a]) ++a;
      return ending(a, choice(a));
    }
    if (greedy() || method == RejectionMethod::kMatch) {
      int a = 0;
      while (a < n && choice(a) == drafts[a]) ++a;
      return ending(a, choice(a));
    }
    if (method == RejectionMethod::kStandard) {
      for (int i = 0; i < n; ++i) {
        if (uniform(i) >= ratio(i)) return ending(i, replacement(i, 1.0));
      }
      return ending(n, choice(n));
    }
    double path = 1.0, path_at_end = 1.0;
    int accepted = 0;
    for (int i = 0; i < n; ++i) {
      path = std::fmin(path * ratio(i), 1.0);
      double threshold = path;
      if (i + 1 < n) {
        double excess = 0.0;
        for (double w : residual(i + 1, path)) excess += w;
        threshold = excess / (excess + 1.0 - path);
      }
      if (uniform(i) >= threshold) continue;
      accepted = i + 1;
      path_at_end = path;
    }
    return ending(accepted, accepted == n ? choice(n) : replacement(accepted, path_at_end));
  }
};

}  // namespace oracle

inline std::vector<int64_t> RejectionCase::target_tokens() const {
  std::vector<int64_t> tokens(positions.size(), -9);
  for (int64_t r = 0; r < num_reqs; ++r) {
    if (idx_mapping[r] < 0) continue;
    const oracle::Verifier verifier{*this, idx_mapping[r], start_loc[r], false, {}};
    for (int i = 0; start_loc[r] + i < start_loc[r + 1]; ++i)
      tokens[start_loc[r] + i] = verifier.choice(i);
  }
  return tokens;
}

inline std::vector<int64_t> RejectionCase::expected(int64_t req, RejectionMethod method,
                                                    bool recorded) const {
  const int64_t state = idx_mapping[req];
  const int num_rows = start_loc[req + 1] - start_loc[req];
  if (state < 0 || num_rows == 0) return {};
  oracle::Verifier verifier{*this, state, start_loc[req], recorded, {}};
  for (int i = 0; i < std::min(num_draft_tokens[state], num_rows - 1); ++i) {
    if (draft_tokens[state * max_drafts + i] < 0) break;
    verifier.drafts.push_back(draft_tokens[state * max_drafts + i]);
  }
  std::vector<int64_t> tokens = verifier.verify(method);
  tokens.resize(std::min<size_t>(tokens.size(), std::max(tokens_left[state], 0)));
  const auto stop = std::find(tokens.begin(), tokens.end(), stop_token_ids[state]);
  if (stop != tokens.end()) tokens.erase(stop + 1, tokens.end());
  return tokens;
}

// Rows of all states in order, N a state, the last state's padded.
struct DraftCase {
  int64_t num_states, num_drafts, vocab_size, target_vocab_size;
  float logit_scale = 0.75f;
  std::vector<float> logits, temperatures;
  std::vector<int64_t> positions, seeds, d2t;
  std::vector<int32_t> idx_mapping;

  DraftCase(int64_t states, int64_t drafts, int64_t vocab, unsigned seed)
      : num_states(states), num_drafts(drafts), vocab_size(vocab), target_vocab_size(vocab + 100) {
    std::mt19937 rng(seed);
    logits = random_logits(rng, states * drafts * vocab);
    for (int64_t s = 0; s < states; ++s) {
      temperatures.push_back(temperature_of(s));
      seeds.push_back(static_cast<int64_t>(rng()) << 20);
      for (int64_t i = 0; i < drafts; ++i) {
        idx_mapping.push_back(s + 1 == states ? -1 : static_cast<int32_t>(s));
        positions.push_back(static_cast<int64_t>(rng() % 10000) + drafts);
      }
    }
    for (int64_t k = 0; k < vocab; ++k) d2t.push_back(k < vocab / 2 ? 3 : 90);
  }

  SampleDraftParams params() const {
    SampleDraftParams p{};
    p.num_rows = num_states * num_drafts;
    p.num_states = num_states;
    p.num_drafts = num_drafts;
    p.vocab_size = vocab_size;
    p.target_vocab_size = target_vocab_size;
    p.logits_stride = vocab_size;
    p.draft_tokens_stride = num_drafts;
    p.draft_logits_strides[0] = num_drafts * target_vocab_size;
    p.draft_logits_strides[1] = target_vocab_size;
    p.logit_scale = logit_scale;
    return p;
  }

  int64_t id(int64_t k, bool reduced) const { return reduced ? k + d2t[k] : k; }

  int64_t expected(int64_t row, bool reduced) const {
    const int64_t s = row / num_drafts;
    const int offset = static_cast<int>(row % num_drafts) + 1;
    const NoiseKey key{Stream::kDraft, offset, seeds[s], positions[row] - offset};
    Row x;
    for (int64_t k = 0; k < vocab_size; ++k) {
      x.push_back(logits[row * vocab_size + k] * logit_scale);
      if (temperatures[s] == 0.0f) continue;
      x.back() = x.back() / temperatures[s] - std::log(exponential(key, id(k, reduced)));
    }
    return id(first_argmax(x), reduced);
  }

  // The record of a row, by target id.
  std::vector<float> expected_record(int64_t row, bool reduced) const {
    std::vector<float> record(static_cast<size_t>(target_vocab_size), kNegativeInfinity);
    for (int64_t k = 0; k < vocab_size; ++k)
      record[id(k, reduced)] = logits[row * vocab_size + k] * logit_scale;
    return record;
  }
};

}  // namespace dflash::testing
