// SPDX-License-Identifier: Apache-2.0
// Random batches of process_logits in host memory and what must come of them, from a sort in
// double: shared by the tests of the CPU twin and of the kernel.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/process_logits.h"
#include "typed.h"

namespace dflash::testing {

// Requests 0 .. R - 1 on states R .. 1, request r with r % 4 rows; the last request is padded, two
// more rows are no one's. Every state has its own parameters, some of them off.
struct LogitsCase {
  static constexpr int kDrafts = 3, kBias = 3, kStopIds = 2;
  static constexpr float kPoison = 77.0f;
  // Mass within which float and double may end the kept part differently.
  static constexpr double kGap = 1e-5;

  int64_t num_reqs, num_states, vocab_size, num_rows;
  std::vector<float> logits;
  std::vector<int32_t> start_loc, idx_mapping, top_ks, token_counts;
  std::vector<int64_t> positions, draft_tokens, bias_ids, min_seq_lens, stop_token_ids;
  std::vector<float> temperatures, top_ps, min_ps, repetition, frequency, presence, bias;

  // Logits of standard deviation `scale`; `step` > 0 rounds them, so that many are equal.
  LogitsCase(int64_t reqs, int64_t vocab, float scale, float step = 0.0f)
      : num_reqs(reqs), num_states(reqs + 1), vocab_size(vocab) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.5f, scale);
    const auto random = [&](int64_t low, int64_t high) {
      return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low));
    };
    // Half of them among the first few, so that lists meet and repeat tokens.
    const auto token = [&] {
      return random(-1, rng() % 2 ? vocab + 1 : std::min<int64_t>(vocab, 5));
    };
    start_loc.push_back(0);
    for (int64_t r = 0; r < reqs; ++r) {
      idx_mapping.push_back(r + 1 == reqs ? -1 : static_cast<int32_t>(reqs - r));
      start_loc.push_back(start_loc.back() + static_cast<int32_t>(r % 4));
    }
    num_rows = start_loc.back() + 2;
    for (int64_t i = 0; i < num_rows; ++i) positions.push_back(random(0, 20));
    for (int64_t i = 0; i < num_rows * vocab; ++i) {
      const float x = normal(rng);
      logits.push_back(step > 0.0f ? std::round(x / step) * step : x);
    }
    for (int64_t s = 0; s < num_states; ++s) add_state(s, random, token);
  }

  ProcessLogitsParams params() const {
    ProcessLogitsParams p{};
    p.num_rows = num_rows;
    p.num_reqs = num_reqs;
    p.num_states = num_states;
    p.vocab_size = vocab_size;
    p.logits_stride = p.output_stride = p.token_counts_stride = vocab_size;
    p.draft_tokens_stride = p.max_drafts = kDrafts;
    p.logit_bias_ids_stride = p.logit_bias_stride = p.num_bias = kBias;
    p.stop_token_ids_stride = p.num_stop_ids = kStopIds;
    return p;
  }

  // Every row of `output`, which was full of kPoison; `raw` are the logits as stored.
  void expect_processed(const std::vector<float>& raw, const std::vector<float>& output) const {
    std::vector<float> expected(output.size(), kPoison);
    std::vector<Must> must(output.size(), Must::kKeep);
    for (int64_t r = 0; r < num_reqs; ++r) {
      for (int32_t row = start_loc[r]; row < start_loc[r + 1] && idx_mapping[r] >= 0; ++row) {
        process(idx_mapping[r], row, row - start_loc[r], raw, expected.data() + row * vocab_size,
                must.data() + row * vocab_size);
      }
    }
    int64_t wrong = 0;
    for (size_t i = 0; i < output.size(); ++i) {
      if (agrees(output[i], expected[i], must[i])) continue;
      if (wrong++ == 0) {
        ADD_FAILURE() << "row " << i / vocab_size << ", token " << i % vocab_size << ": "
                      << output[i] << ", expected " << expected[i];
      }
    }
    EXPECT_EQ(wrong, 0);
  }

 private:
  enum class Must : uint8_t { kKeep, kDrop, kEither };

  template <typename Random, typename Token>
  void add_state(int64_t s, const Random& random, const Token& token) {
    const auto of = [&](auto values) { return values.begin()[s % values.size()]; };
    using Floats = std::initializer_list<float>;
    const int32_t whole = static_cast<int32_t>(vocab_size);
    temperatures.push_back(of(Floats{0.6f, 1.0f, 0.0f, 1.7f, 0.8f}));
    top_ks.push_back(of(std::initializer_list<int32_t>{20, 1, 0, whole, 3, 700, 0}));
    top_ps.push_back(of(Floats{0.95f, 0.5f, 1e-6f, 1.0f, 0.999f, 0.9f}));
    min_ps.push_back(of(Floats{0.05f, 0.0f, 1e-4f, 0.0f}));
    repetition.push_back(of(Floats{1.2f, 1.0f, 0.8f}));
    frequency.push_back(of(Floats{0.25f, 0.0f, -0.5f, 0.125f}));
    presence.push_back(of(Floats{0.0f, 0.5f, 1.5f, -0.25f, 0.0f}));
    min_seq_lens.push_back(random(0, 20));
    for (int i = 0; i < kDrafts; ++i) draft_tokens.push_back(token());
    for (int i = 0; i < kStopIds; ++i) stop_token_ids.push_back(token());
    for (int i = 0; i < kBias; ++i) {
      bias_ids.push_back(token());
      bias.push_back(static_cast<float>(random(-8, 9)));
    }
    for (int64_t v = 0; v < vocab_size; ++v) {
      const int32_t generated = random(0, 4) == 0 ? static_cast<int32_t>(random(1, 4)) : 0;
      token_counts.push_back(random(0, 4) == 0 ? INT32_MIN + generated : generated);
    }
  }

  static bool agrees(float actual, float expected, Must must) {
    const bool dropped = actual == kNegativeInfinity;
    if (expected == kNegativeInfinity || must == Must::kDrop) return dropped;
    if (dropped) return must == Must::kEither;
    return std::fabs(actual - expected) <= 2e-6f * std::max(1.0f, std::fabs(expected));
  }

  void process(int64_t s, int64_t row, int64_t i, const std::vector<float>& raw, float* x,
               Must* must) const {
    for (int64_t v = 0; v < vocab_size; ++v) x[v] = processed(s, row, i, v, raw);
    if (temperatures[s] == 0.0f) return;
    const double max = *std::max_element(x, x + vocab_size);
    if (max == kNegativeInfinity) return;
    std::vector<double> left;
    for (int64_t v = 0; v < vocab_size; ++v) {
      const double above_floor = min_ps[s] > 0.0f ? x[v] - max - std::log(min_ps[s]) : 1.0;
      must[v] = above_floor > kGap    ? Must::kKeep
                : above_floor < -kGap ? Must::kDrop
                                      : Must::kEither;
      if (must[v] != Must::kDrop && x[v] > kNegativeInfinity) left.push_back(x[v]);
    }
    std::sort(left.begin(), left.end(), std::greater<double>());
    const size_t k = top_ks[s] > 0 ? static_cast<size_t>(top_ks[s]) : left.size();
    const double kth = k < left.size() ? left[k - 1] : left.back();
    while (left.back() < kth) left.pop_back();
    const auto [surely, perhaps] = nucleus(left, max, top_ps[s]);
    for (int64_t v = 0; v < vocab_size; ++v) {
      if (x[v] < perhaps) must[v] = Must::kDrop;
      else if (x[v] < surely && must[v] == Must::kKeep) must[v] = Must::kEither;
    }
  }

  // The least logits with less than p -+ kGap of the mass strictly above them.
  static std::pair<double, double> nucleus(const std::vector<double>& left, double max, double p) {
    if (p >= 1.0) return {left.back(), left.back()};
    double total = 0.0, above = 0.0, surely = max, perhaps = max;
    for (double x : left) total += std::exp(x - max);
    for (size_t i = 0; i < left.size();) {
      const double x = left[i];
      if (above < (p - kGap) * total) surely = x;
      if (above < (p + kGap) * total) perhaps = x;
      for (; i < left.size() && left[i] == x; ++i) above += std::exp(x - max);
    }
    return {surely, perhaps};
  }

  float processed(int64_t s, int64_t row, int64_t i, int64_t v,
                  const std::vector<float>& raw) const {
    float x = raw[row * vocab_size + v];
    for (int k = 0; k < kBias; ++k) x += bias_ids[s * kBias + k] == v ? bias[s * kBias + k] : 0.0f;
    for (int k = 0; k < kStopIds; ++k) {
      if (positions[row] + 1 < min_seq_lens[s] && stop_token_ids[s * kStopIds + k] == v)
        return kNegativeInfinity;
    }
    const int32_t count = token_counts[s * vocab_size + v];
    int64_t generated = count < 0 ? int64_t{count} - INT32_MIN : count;
    for (int64_t d = 0; d < std::min<int64_t>(i, kDrafts); ++d)
      generated += draft_tokens[s * kDrafts + d] == v;
    if (generated > 0 || count < 0) x = x > 0.0f ? x / repetition[s] : x * repetition[s];
    x -= frequency[s] * static_cast<float>(generated);
    if (generated > 0) x -= presence[s];
    return temperatures[s] > 0.0f ? x / temperatures[s] : x;
  }
};

// Asks `place` for a pointer to each vector, so that one case serves the twin and the kernel.
template <typename Place>
ProcessLogitsParams placed(const LogitsCase& c, Place&& place) {
  ProcessLogitsParams p = c.params();
  p.logits_start_loc = place(c.start_loc);
  p.logits_positions = place(c.positions);
  p.idx_mapping = place(c.idx_mapping);
  p.draft_tokens = place(c.draft_tokens);
  p.temperatures = place(c.temperatures);
  p.top_ks = place(c.top_ks);
  p.top_ps = place(c.top_ps);
  p.min_ps = place(c.min_ps);
  p.repetition_penalties = place(c.repetition);
  p.frequency_penalties = place(c.frequency);
  p.presence_penalties = place(c.presence);
  p.token_counts = place(c.token_counts);
  p.logit_bias_ids = place(c.bias_ids);
  p.logit_bias = place(c.bias);
  p.min_seq_lens = place(c.min_seq_lens);
  p.stop_token_ids = place(c.stop_token_ids);
  return p;
}

struct LogitsShape {
  int64_t num_reqs, vocab_size;
  float scale, step;
};

// Few and many columns, logits that are all different, nearly equal, often equal and far apart.
inline const LogitsShape kLogitsShapes[] = {
    {24, 1, 2.0f, 0.0f},     {24, 7, 2.0f, 0.0f},       {24, 37, 2.0f, 0.5f},
    {24, 1000, 2.0f, 0.0f},  {24, 4097, 20.0f, 0.0f},   {24, 9001, 2.0f, 0.25f},
    {16, 9001, 1e-6f, 0.0f},
};

inline const LogitsShape kLargeLogitsShapes[] = {
    {16, 20000, 0.02f, 0.0f},
    {16, 20000, 1000.0f, 0.0f},
    {8, 151936, 3.0f, 0.0f},
    {8, 49152, 1e-3f, 1e-3f},
};

}  // namespace dflash::testing
