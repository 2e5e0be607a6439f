// SPDX-License-Identifier: Apache-2.0
#include "kernels/process_logits.h"

#include <gtest/gtest.h>

#include <memory>

#include "../logits_cases.h"
#include "device_array.h"

namespace dflash {
namespace {

using testing::DeviceArray;
using testing::LogitsCase;

// Device copies of a case's vectors, alive as long as this.
class Placed {
 public:
  template <typename T>
  const T* operator()(const std::vector<T>& v) {
    auto copy = std::make_shared<DeviceArray<T>>(v);
    copies_.push_back(copy);
    return copy->data();
  }

 private:
  std::vector<std::shared_ptr<void>> copies_;
};

LogitsCase make_case(const testing::LogitsShape& shape) {
  return LogitsCase(shape.num_reqs, shape.vocab_size, shape.scale, shape.step);
}

class ProcessLogitsKernel : public ::testing::TestWithParam<testing::LogitsShape> {};

template <typename T>
void expect_equal_to_the_oracle(const testing::LogitsShape& shape) {
  const LogitsCase c = make_case(shape);
  const DeviceArray<T> logits(test::typed<T>(c.logits));
  const DeviceArray<float> output(std::vector<float>(c.logits.size(), LogitsCase::kPoison));
  Placed place;
  ProcessLogitsParams p = placed(c, place);
  p.logits = logits.data();
  p.dtype = test::kDType<T>;
  p.output = output.data();
  ASSERT_EQ(launch_process_logits(p, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  c.expect_processed(test::floats(logits.to_host()), output.to_host());
}

TEST_P(ProcessLogitsKernel, EqualsTheOracle) {
  expect_equal_to_the_oracle<float>(GetParam());
  expect_equal_to_the_oracle<Half>(GetParam());
  expect_equal_to_the_oracle<BFloat16>(GetParam());
}

// In place, from other addresses and again: the bits are those of the first time.
TEST_P(ProcessLogitsKernel, RepeatsItsBitsInPlace) {
  const LogitsCase c = make_case(GetParam());
  const DeviceArray<float> logits(c.logits), output(c.logits);
  Placed place;
  ProcessLogitsParams p = placed(c, place);
  p.logits = logits.data();
  p.dtype = DType::kFloat32;
  p.output = output.data();
  ASSERT_EQ(launch_process_logits(p, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> once = output.to_host();
  p.output = logits.data();
  ASSERT_EQ(launch_process_logits(p, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(logits.to_host(), once);
}

// Against the twin, which ends the kept part in double: a few logits at its end may differ.
TEST_P(ProcessLogitsKernel, KeepsWhatTheTwinKeeps) {
  const LogitsCase c = make_case(GetParam());
  std::vector<float> expected(c.logits.size(), LogitsCase::kPoison);
  ProcessLogitsParams p = placed(c, [](const auto& v) { return v.data(); });
  p.logits = c.logits.data();
  p.dtype = DType::kFloat32;
  p.output = expected.data();
  cpu::process_logits(p);

  const DeviceArray<float> logits(c.logits);
  const DeviceArray<float> output(std::vector<float>(c.logits.size(), LogitsCase::kPoison));
  Placed place;
  p = placed(c, place);
  p.logits = logits.data();
  p.dtype = DType::kFloat32;
  p.output = output.data();
  ASSERT_EQ(launch_process_logits(p, nullptr), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> actual = output.to_host();
  int64_t kept_by_one = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const bool kept = actual[i] > kNegativeInfinity;
    if (kept != (expected[i] > kNegativeInfinity)) ++kept_by_one;
    else if (kept) ASSERT_NEAR(actual[i], expected[i], 2e-6f * std::fabs(expected[i]) + 1e-6f);
  }
  EXPECT_LE(kept_by_one, static_cast<int64_t>(actual.size() / 1000));
}

INSTANTIATE_TEST_SUITE_P(Shapes, ProcessLogitsKernel, ::testing::ValuesIn(testing::kLogitsShapes));
INSTANTIATE_TEST_SUITE_P(LargeShapes, ProcessLogitsKernel,
                         ::testing::ValuesIn(testing::kLargeLogitsShapes));

}  // namespace
}  // namespace dflash
