// SPDX-License-Identifier: Apache-2.0
#include "kernels/process_logits.h"

#include <gtest/gtest.h>

#include "logits_cases.h"

namespace dflash {
namespace {

using testing::LogitsCase;

class ProcessLogits : public ::testing::TestWithParam<testing::LogitsShape> {};

template <typename T>
void expect_equal_to_the_oracle(const testing::LogitsShape& shape) {
  const LogitsCase c(shape.num_reqs, shape.vocab_size, shape.scale, shape.step);
  const std::vector<T> logits = test::typed<T>(c.logits);
  std::vector<float> output(c.logits.size(), LogitsCase::kPoison);
  ProcessLogitsParams p = placed(c, [](const auto& v) { return v.data(); });
  p.logits = logits.data();
  p.dtype = test::kDType<T>;
  p.output = output.data();
  cpu::process_logits(p);
  c.expect_processed(test::floats(logits), output);
}

TEST_P(ProcessLogits, EqualsTheOracle) {
  expect_equal_to_the_oracle<float>(GetParam());
  expect_equal_to_the_oracle<Half>(GetParam());
  expect_equal_to_the_oracle<BFloat16>(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Shapes, ProcessLogits, ::testing::ValuesIn(testing::kLogitsShapes));
INSTANTIATE_TEST_SUITE_P(LargeShapes, ProcessLogits,
                         ::testing::ValuesIn(testing::kLargeLogitsShapes));

}  // namespace
}  // namespace dflash
