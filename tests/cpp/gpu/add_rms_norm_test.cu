// SPDX-License-Identifier: Apache-2.0
#include "kernels/add_rms_norm.h"

#include <gtest/gtest.h>

#include "../typed.h"
#include "device_place.h"

namespace dflash::test {
namespace {

// Rows `pad` elements wider than they need be, so that a stride is never the size.
template <typename T>
struct NormBatch {
  int64_t num_rows, size, stride;
  std::vector<T> x, residual, weight, output, tap;

  NormBatch(int64_t num_rows, int64_t size, int64_t pad)
      : num_rows(num_rows), size(size), stride(size + pad) {
    UniformValues random(7);
    x = typed<T>(random(num_rows * stride));
    residual = typed<T>(random(num_rows * stride));
    weight = typed<T>(random(size));
    output = typed<T>(std::vector<float>(num_rows * stride, 5));
    tap = output;
  }

  template <typename Place>
  AddRmsNormParams params(Place&& place, bool with_x, bool with_tap) {
    AddRmsNormParams p{};
    p.x = with_x ? place(x) : nullptr;
    p.residual = place(residual);
    p.weight = place(weight);
    p.output = place(output);
    p.tap = with_tap ? place(tap) : nullptr;
    p.num_rows = num_rows;
    p.size = size;
    p.x_stride = p.residual_stride = p.output_stride = p.tap_stride = stride;
    p.eps = 1e-5f;
    p.dtype = kDType<T>;
    return p;
  }
};

template <typename T>
void expect_kernel_equals_twin(const NormBatch<T>& batch, bool with_x, bool with_tap) {
  NormBatch<T> host = batch, device = batch;
  cpu::add_rms_norm(host.params([](auto& v) { return v.data(); }, with_x, with_tap));
  DevicePlace place;
  ASSERT_EQ(launch_add_rms_norm(device.params(place, with_x, with_tap), nullptr), cudaSuccess);
  place.copy_back();
  EXPECT_EQ(floats(device.residual), floats(host.residual));
  EXPECT_EQ(floats(device.tap), floats(host.tap));
  expect_near(device.output, host.output);
}

template <typename T>
class AddRmsNormKernel : public ::testing::Test {};
using Types = ::testing::Types<float, Half, BFloat16>;
TYPED_TEST_SUITE(AddRmsNormKernel, Types);

TYPED_TEST(AddRmsNormKernel, EqualsTwin) {
  for (int64_t num_rows : {1, 17, 300}) {
    for (int64_t size : {8, 17, 576, 4096}) {
      for (int64_t pad : {0, 3, 8}) {
        const NormBatch<TypeParam> batch(num_rows, size, pad);
        expect_kernel_equals_twin(batch, true, false);
        expect_kernel_equals_twin(batch, true, true);
        expect_kernel_equals_twin(batch, false, true);
      }
    }
  }
}

// More columns than a thread keeps in registers.
TYPED_TEST(AddRmsNormKernel, EqualsTwinOnWideRows) {
  for (int64_t num_rows : {2, 257}) {
    expect_kernel_equals_twin(NormBatch<TypeParam>(num_rows, 40000, 0), true, true);
    expect_kernel_equals_twin(NormBatch<TypeParam>(num_rows, 5001, 1), true, true);
  }
}

}  // namespace
}  // namespace dflash::test
