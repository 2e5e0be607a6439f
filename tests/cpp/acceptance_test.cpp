// SPDX-License-Identifier: Apache-2.0
#include "kernels/common/acceptance.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/common/logits.h"

namespace dflash {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

TEST(Argmax, KeysOrderAsFloatsDo) {
  const float ascending[] = {-kInfinity, -3e38f, -1.0f, -1e-40f,  0.0f,
                             1e-40f,     1.0f,   3e38f, kInfinity};
  for (size_t i = 1; i < std::size(ascending); ++i) {
    EXPECT_LT(argmax_key(ascending[i - 1], 0), argmax_key(ascending[i], 0xfffffffe));
  }
  EXPECT_EQ(argmax_key(-0.0f, 5), argmax_key(0.0f, 5));
  EXPECT_EQ(argmax_key(kNan, 5), argmax_key(-kInfinity, 5));
  EXPECT_GT(argmax_key(2.0f, 5), argmax_key(2.0f, 6));
}

TEST(Argmax, KeysHoldValueAndIndex) {
  for (float value : {-7.5f, 0.0f, 1e-40f, 12.25f}) {
    const uint64_t key = argmax_key(value, 151935);
    EXPECT_EQ(argmax_value(key), value);
    EXPECT_EQ(argmax_index(key), 151935);
  }
}

TEST(Logits, DifferencesAreNeverNan) {
  EXPECT_EQ(clean_logit(kNan), -kInfinity);
  EXPECT_EQ(clean_logit(-kInfinity), -kInfinity);
  EXPECT_EQ(clean_logit(kInfinity), std::numeric_limits<float>::max());
  EXPECT_EQ(clean_logit(kInfinity) - softmax_origin(clean_logit(kInfinity)), 0.0f);
  EXPECT_EQ(std::exp(-kInfinity - softmax_origin(-kInfinity)), 0.0f);
}

TEST(Acceptance, StandardIsCertainWhereTheTargetLikesTheDraftMore) {
  const float largest = 1.0f - std::ldexp(1.0f, -24);
  EXPECT_TRUE(accepts_standard(largest, 0.25f, 0.25f));
  EXPECT_FALSE(accepts_standard(std::ldexp(1.0f, -33), 0.0f, 0.5f));
  EXPECT_TRUE(accepts_standard(0.49f, 0.25f, 0.5f));
  EXPECT_FALSE(accepts_standard(0.51f, 0.25f, 0.5f));
  EXPECT_FALSE(accepts_synthetic(std::ldexp(1.0f, -33), 0.0f));
  EXPECT_TRUE(accepts_synthetic(largest, 1.0f));
}

TEST(Acceptance, BlockPathIsCappedAndNeverRecoversFromZero) {
  EXPECT_EQ(block_path(1.0f, 0.5f, 0.25f), 1.0f);
  EXPECT_EQ(block_path(1.0f, 0.25f, 0.5f), 0.5f);
  EXPECT_EQ(block_path(0.5f, 0.25f, 0.5f), 0.25f);
  EXPECT_EQ(block_path(0.0f, 0.25f, 0.5f), 0.0f);
  EXPECT_EQ(block_path(1.0f, 0.0f, 0.0f), 0.0f);
  EXPECT_EQ(block_path(1.0f, 0.5f, 0.0f), 1.0f);
}

TEST(Acceptance, BlockThreshold) {
  EXPECT_FLOAT_EQ(block_threshold(0.5f, 0.25f), 0.25f / 0.75f);
  EXPECT_EQ(block_threshold(0.0f, 0.0f), 0.0f);
  EXPECT_EQ(block_threshold(1.0f, 0.25f), 1.0f);
  EXPECT_EQ(block_threshold(1.0f, 0.0f), 1.0f);
  EXPECT_FLOAT_EQ(one_hot_excess(0.5f, 0.25f), 0.375f);
  EXPECT_EQ(one_hot_excess(1.0f, 1.0000001f), 0.0f);
}

TEST(Acceptance, ResidualScoresPreferAnyWeightToNone) {
  EXPECT_EQ(residual_weight(1.0f, 0.25f, 0.5f), 0.0f);
  EXPECT_FLOAT_EQ(residual_weight(0.5f, 0.5f, 0.125f), 0.125f);
  EXPECT_GT(residual_score(1e-30f, 0.1f, 16.0f), residual_score(0.0f, 0.9f, 1e-9f));
  EXPECT_GT(residual_score(0.0f, 0.9f, 1.0f), residual_score(0.0f, 0.1f, 1.0f));
  EXPECT_EQ(residual_score(0.0f, 0.0f, 1.0f), -kInfinity);
}

}  // namespace
}  // namespace dflash
