// SPDX-License-Identifier: Apache-2.0
// What the C++ tests share: storage types by their DType, and vectors of them from floats.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/common/dtype.h"

namespace dflash::test {

template <typename T>
inline constexpr DType kDType = DType::kFloat32;
template <>
inline constexpr DType kDType<Half> = DType::kFloat16;
template <>
inline constexpr DType kDType<BFloat16> = DType::kBFloat16;
template <>
inline constexpr DType kDType<Float8E4M3> = DType::kFloat8E4M3;

// What one rounding to T can change, relative to the value.
template <typename T>
inline constexpr float kTolerance = 1e-5f;
template <>
inline constexpr float kTolerance<Half> = 2e-3f;
template <>
inline constexpr float kTolerance<BFloat16> = 1e-2f;
template <>
inline constexpr float kTolerance<Float8E4M3> = 0.13f;

template <typename T>
std::vector<T> typed(const std::vector<float>& values) {
  std::vector<T> out;
  for (float value : values) out.push_back(from_float<T>(value));
  return out;
}

template <typename T>
std::vector<float> floats(const std::vector<T>& values) {
  std::vector<float> out;
  for (T value : values) out.push_back(to_float(value));
  return out;
}

// Every element within the rounding of T, scaled by the larger of the value and 1; NaN never
// passes.
template <typename T>
void expect_near(const std::vector<T>& actual, const std::vector<T>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  int64_t wrong = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const float a = to_float(actual[i]), e = to_float(expected[i]);
    const float bound = kTolerance<T> * std::max(1.0f, std::fabs(e));
    if (std::fabs(a - e) <= bound) continue;
    if (wrong++ == 0) ADD_FAILURE() << "element " << i << ": " << a << ", expected " << e;
  }
  EXPECT_EQ(wrong, 0);
}

// Uniform in [-2, 2), the same on every machine.
class UniformValues {
 public:
  explicit UniformValues(uint64_t seed) : state_(seed) {}

  std::vector<float> operator()(int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& value : out) value = static_cast<float>(next() >> 8) * (4.0f / (1 << 24)) - 2.0f;
    return out;
  }

 private:
  uint32_t next() {
    state_ = state_ * 6364136223846793005ULL + 1442695040888963407ULL;
    return static_cast<uint32_t>(state_ >> 32);
  }

  uint64_t state_;
};

}  // namespace dflash::test
