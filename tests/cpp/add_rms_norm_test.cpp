// SPDX-License-Identifier: Apache-2.0
#include "kernels/add_rms_norm.h"

#include <gtest/gtest.h>

#include "typed.h"

namespace dflash {
namespace {

using test::floats;
using test::kDType;
using test::typed;
using Floats = std::vector<float>;

template <typename T>
class AddRmsNorm : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(AddRmsNorm, Types);

template <typename T>
AddRmsNormParams make_params(std::vector<T>& residual, std::vector<T>& weight,
                             std::vector<T>& output, int64_t num_rows, float eps) {
  AddRmsNormParams p{};
  p.residual = residual.data();
  p.weight = weight.data();
  p.output = output.data();
  p.num_rows = num_rows;
  p.size = static_cast<int64_t>(weight.size());
  p.residual_stride = p.size;
  p.output_stride = p.size;
  p.eps = eps;
  p.dtype = kDType<T>;
  return p;
}

// Mean square 9, eps 7: the root is 4 and every value is exact.
TYPED_TEST(AddRmsNorm, AddsNormsAndTaps) {
  auto x = typed<TypeParam>({1, -1, 2, -2, 0, 0, 0, 0});
  auto residual = typed<TypeParam>({2, -2, 1, -1, 3, 3, -3, -3});
  auto weight = typed<TypeParam>({1, 2, 4, 8});
  std::vector<TypeParam> output(8), tap(24, from_float<TypeParam>(77));
  auto p = make_params(residual, weight, output, 2, 7.0f);
  p.x = x.data();
  p.x_stride = 4;
  p.tap = tap.data() + 4;
  p.tap_stride = 12;
  cpu::add_rms_norm(p);
  EXPECT_EQ(floats(residual), (Floats{3, -3, 3, -3, 3, 3, -3, -3}));
  EXPECT_EQ(floats(output), (Floats{0.75, -1.5, 3, -6, 0.75, 1.5, -3, -6}));
  EXPECT_EQ(floats(tap), (Floats{77, 77, 77, 77, 3, -3, 3,  -3, 77, 77, 77, 77,
                                 77, 77, 77, 77, 3, 3,  -3, -3, 77, 77, 77, 77}));
}

TYPED_TEST(AddRmsNorm, WithoutXOnlyNorms) {
  auto residual = typed<TypeParam>(Floats(577, -2));
  auto weight = typed<TypeParam>(Floats(577, 3));
  std::vector<TypeParam> output(577);
  cpu::add_rms_norm(make_params(residual, weight, output, 1, 0.0f));
  EXPECT_EQ(floats(residual), Floats(577, -2));
  EXPECT_EQ(floats(output), Floats(577, -3));
}

TYPED_TEST(AddRmsNorm, NoRowsTouchNothing) {
  std::vector<TypeParam> residual, output, weight(4);
  cpu::add_rms_norm(make_params(residual, weight, output, 0, 0.0f));
}

// 256 + 1 rounds to 256 in bfloat16: the norm is of what the residual holds.
TEST(AddRmsNormRounding, NormIsOfTheRoundedResidual) {
  auto x = typed<BFloat16>(Floats(32, 1));
  auto residual = typed<BFloat16>(Floats(32, 256));
  auto weight = typed<BFloat16>(Floats(32, 1));
  std::vector<BFloat16> output(32);
  auto p = make_params(residual, weight, output, 1, 0.0f);
  p.x = x.data();
  cpu::add_rms_norm(p);
  EXPECT_EQ(floats(residual), Floats(32, 256));
  EXPECT_EQ(floats(output), Floats(32, 1));
}

}  // namespace
}  // namespace dflash
