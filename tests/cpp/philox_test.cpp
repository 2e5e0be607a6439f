// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace dflash {
namespace {

struct KnownAnswer {
  uint64_t key;
  uint32_t counter[4];
  uint32_t words[4];
};

// Random123's kat_vectors for philox4x32, 10 rounds.
constexpr KnownAnswer kKnownAnswers[] = {
    {0, {0, 0, 0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {~uint64_t{0},
     {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {0x299f31d0a4093822,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

TEST(Philox, KnownAnswers) {
  for (const KnownAnswer& k : kKnownAnswers) {
    const Philox4 w = philox4x32_10(k.key, k.counter[0], k.counter[1], k.counter[2], k.counter[3]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(w.x[i], k.words[i]);
  }
}

TEST(Philox, EveryPartOfTheKeyCounts) {
  const NoiseKey base{Stream::kDraft, 3, 7, 11};
  std::set<uint32_t> words{stream_word(base, 0)};
  const int64_t high = int64_t{1} << 40;
  const NoiseKey others[] = {{Stream::kTarget, 3, 7, 11},   {Stream::kAcceptance, 3, 7, 11},
                             {Stream::kResidual, 3, 7, 11}, {Stream::kDraft, 4, 7, 11},
                             {Stream::kDraft, 3, 8, 11},    {Stream::kDraft, 3, 7 + high, 11},
                             {Stream::kDraft, 3, 7, 12},    {Stream::kDraft, 3, 7, 11 + high}};
  for (const NoiseKey& key : others) EXPECT_TRUE(words.insert(stream_word(key, 0)).second);
  for (int64_t token = 1; token < 100; ++token)
    EXPECT_TRUE(words.insert(stream_word(base, token)).second);
}

TEST(Philox, AQuadHoldsTheWordsOfFourTokens) {
  const NoiseKey key{Stream::kTarget, 0, -5, 1234567};
  for (uint32_t quad = 0; quad < 50; ++quad) {
    const Philox4 words = stream_words(key, quad);
    for (int k = 0; k < 4; ++k) EXPECT_EQ(stream_word(key, 4 * quad + k), words.x[k]);
  }
}

TEST(Noise, UniformsAreOpenAndKeep32BitsNearZero) {
  EXPECT_EQ(uniform_from_word(0), std::ldexp(1.0f, -33));
  EXPECT_EQ(uniform_from_word(1), std::ldexp(1.5f, -32));
  EXPECT_EQ(uniform_from_word(0xffffffff), 1.0f - std::ldexp(1.0f, -24));
  for (uint32_t word = 12345; word < 0xf0000000; word += 0x01234567) {
    const float direct = (static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f;
    EXPECT_EQ(uniform_from_word(word), direct);
  }
}

void expect_precise(uint32_t word) {
  const double exponential = -std::log1p(-static_cast<double>(uniform_from_word(word)));
  EXPECT_NEAR(exponential_from_word(word) / exponential, 1.0, 4e-7) << word;
  const double gumbel = -std::log(exponential);
  EXPECT_NEAR(gumbel_from_word(word), gumbel, 4e-7 * std::fmax(1.0, std::fabs(gumbel))) << word;
}

TEST(Noise, LogarithmsArePrecise) {
  for (uint32_t word = 0; word < 3000; ++word) expect_precise(word);
  for (uint32_t word = 0; word < 3000; ++word) expect_precise(0xffffffffu - word);
  for (uint64_t word = 0; word < (uint64_t{1} << 32); word += 99991)
    expect_precise(static_cast<uint32_t>(word));
}

TEST(Noise, MomentsOfTheStandardExponential) {
  const NoiseKey key{Stream::kTarget, 0, 42, 99};
  constexpr int kCount = 1 << 18;
  double sum = 0.0, squares = 0.0;
  for (int i = 0; i < kCount; ++i) {
    const double e = exponential_from_word(stream_word(key, i));
    sum += e;
    squares += e * e;
  }
  EXPECT_NEAR(sum / kCount, 1.0, 0.01);
  EXPECT_NEAR(squares / kCount, 2.0, 0.05);
}

}  // namespace
}  // namespace dflash
