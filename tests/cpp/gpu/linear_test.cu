// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear.h"

#include <gtest/gtest.h>

#include <limits>

#include "../typed.h"
#include "device_place.h"
#include "kernels/common/overlap.h"
#include "kernels/linear_silu_mul.h"
#include "kernels/silu_mul.h"

namespace dflash::test {
namespace {

// Rows of x and of the output are wider than they need be; what lies between is NaN in x, and must
// stay 5 in the output.
template <typename T>
struct LinearBatch {
  int64_t num_rows, num_outputs, size, x_stride, output_stride;
  std::vector<T> x, weight, bias, output;

  LinearBatch(int64_t num_rows, int64_t num_outputs, int64_t size, int64_t pad = 8)
      : num_rows(num_rows),
        num_outputs(num_outputs),
        size(size),
        x_stride(size + pad),
        output_stride(num_outputs + pad) {
    UniformValues random(11);
    std::vector<float> values = random(num_rows * x_stride);
    for (int64_t i = 0; i < num_rows * x_stride; ++i) {
      if (i % x_stride >= size) values[i] = std::numeric_limits<float>::quiet_NaN();
    }
    x = typed<T>(values);
    std::vector<float> w = random(num_outputs * size);
    for (float& value : w) value /= std::sqrt(static_cast<float>(size));
    weight = typed<T>(w);
    bias = typed<T>(random(num_outputs));
    output = typed<T>(std::vector<float>(num_rows * output_stride, 5));
  }

  template <typename Place>
  LinearParams params(Place&& place, bool with_bias) {
    return {place(x),    place(weight), with_bias ? place(bias) : nullptr,
            place(output), num_rows,      num_outputs,
            size,        x_stride,      size,
            output_stride, kDType<T>};
  }
};

// By the twin in fp32.
template <typename T>
std::vector<T> expected(const LinearBatch<T>& b, bool with_bias) {
  std::vector<float> x = floats(b.x), weight = floats(b.weight), bias = floats(b.bias);
  std::vector<float> output = floats(b.output);
  cpu::linear({x.data(), weight.data(), with_bias ? bias.data() : nullptr, output.data(),
               b.num_rows, b.num_outputs, b.size, b.x_stride, b.size, b.output_stride,
               DType::kFloat32});
  return typed<T>(output);
}

template <typename T>
std::vector<T> run(const LinearBatch<T>& batch, bool with_bias) {
  LinearBatch<T> b = batch;
  DevicePlace place;
  EXPECT_EQ(launch_linear(b.params(place, with_bias), nullptr), cudaSuccess);
  place.copy_back();
  return b.output;
}

template <typename T>
class LinearKernel : public ::testing::Test {};
using Types = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(LinearKernel, Types);

TYPED_TEST(LinearKernel, EqualsTwin) {
  for (int64_t num_rows : {1, 7, 16, 17, 33, 65, 128}) {
    for (int64_t num_outputs : {1, 7, 64, 100, 200}) {
      for (int64_t size : {8, 64, 136, 576}) {
        const LinearBatch<TypeParam> batch(num_rows, num_outputs, size);
        SCOPED_TRACE(::testing::Message() << num_rows << " " << num_outputs << " " << size);
        expect_near(run(batch, true), expected(batch, true));
      }
    }
  }
}

// Two splits, a ring that turns, tiles of three warpgroups and more tiles than SMs.
TYPED_TEST(LinearKernel, EqualsTwinWhereTheRingTurns) {
  for (int64_t num_rows : {3, 24, 57, 128}) {
    const LinearBatch<TypeParam> split(num_rows, 130, 5128), many(num_rows, 64 * 140 + 24, 328);
    expect_near(run(split, false), expected(split, false));
    expect_near(run(many, true), expected(many, true));
  }
}

TYPED_TEST(LinearKernel, ARowDoesNotDependOnTheOthers) {
  for (int64_t num_outputs : {100, 64 * 133}) {
    const int64_t size = num_outputs == 100 ? 2056 : 264;
    const LinearBatch<TypeParam> all(128, num_outputs, size);
    const std::vector<float> together = floats(run(all, true));
    for (int64_t num_rows : {1, 5, 16, 31, 64, 100}) {
      LinearBatch<TypeParam> some = all;
      some.num_rows = num_rows;
      some.x.resize(num_rows * some.x_stride);
      some.output.resize(num_rows * some.output_stride);
      const std::vector<float> alone = floats(run(some, true));
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin())) << num_rows;
    }
  }
}

// Sums as they are: what the twin has in fp32, and rounded what the kernel stores.
TYPED_TEST(LinearKernel, WritesSumsInFp32) {
  for (int64_t num_rows : {1, 16, 29, 57, 128}) {
    for (const auto& [num_outputs, size] : {std::pair<int64_t, int64_t>{7, 72}, {130, 5128},
                                            {64 * 140 + 24, 136}}) {
      LinearBatch<TypeParam> batch(num_rows, num_outputs, size);
      std::vector<float> x = floats(batch.x), weight = floats(batch.weight);
      std::vector<float> sums(num_rows * batch.output_stride, 5), twin = sums;
      cpu::linear({x.data(), weight.data(), nullptr, twin.data(), num_rows, num_outputs, size,
                   batch.x_stride, size, batch.output_stride, DType::kFloat32});
      DevicePlace place;
      LinearParams p = batch.params(place, false);
      p.output = place(sums);
      p.writes_float = true;
      ASSERT_EQ(launch_linear(p, nullptr), cudaSuccess);
      place.copy_back();
      SCOPED_TRACE(::testing::Message() << num_rows << " " << num_outputs << " " << size);
      for (size_t i = 0; i < sums.size(); ++i)  // tensor cores truncate where they add
        ASSERT_NEAR(sums[i], twin[i], 1e-4f * std::max(1.0f, std::fabs(twin[i]))) << i;
      EXPECT_EQ(floats(typed<TypeParam>(sums)), floats(run(batch, false)));
    }
  }
}

TYPED_TEST(LinearKernel, WritesRowsOfAnyAlignment) {
  LinearBatch<TypeParam> batch(20, 101, 64);
  batch.output_stride = 103;
  batch.output.resize(20 * 103);
  expect_near(run(batch, false), expected(batch, false));
}

TYPED_TEST(LinearKernel, RefusesWhatItCannotStream) {
  LinearBatch<TypeParam> batch(4, 8, 64);
  DevicePlace place;
  const LinearParams good = batch.params(place, false);
  LinearParams bad = good;
  bad.num_rows = 129;
  EXPECT_EQ(launch_linear(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.x_stride = 65;
  EXPECT_EQ(launch_linear(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.weight = static_cast<const uint8_t*>(good.weight) + 2;
  EXPECT_EQ(launch_linear(bad, nullptr), cudaErrorInvalidValue);
  bad = batch.params(place, true), bad.writes_float = true;
  EXPECT_EQ(launch_linear(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.dtype = DType::kFloat32;
  EXPECT_EQ(launch_linear(bad, nullptr), cudaErrorInvalidValue);
}

TYPED_TEST(LinearKernel, FusedHasTheBitsOfLinearAndSiluMul) {
  for (int64_t num_rows : {1, 16, 29, 64, 128}) {
    for (int64_t num_outputs : {8, 72, 64 * 67}) {
      for (int64_t size : {72, 1160}) {
        LinearBatch<TypeParam> batch(num_rows, 2 * num_outputs, size);
        DevicePlace place;
        const LinearParams p = batch.params(place, false);
        ASSERT_EQ(launch_linear(p, nullptr), cudaSuccess);
        std::vector<TypeParam> two_ops = typed<TypeParam>(
            std::vector<float>(num_rows * num_outputs, 5)), fused = two_ops;
        const SiluMulParams silu{p.output, place(two_ops), num_rows, num_outputs,
                                 p.output_stride, num_outputs, p.dtype};
        ASSERT_EQ(launch_silu_mul(silu, nullptr), cudaSuccess);
        const LinearSiluMulParams q{p.x, p.weight, place(fused), num_rows, num_outputs, size,
                                    p.x_stride, p.weight_stride, num_outputs, p.dtype};
        ASSERT_EQ(launch_linear_silu_mul(q, nullptr), cudaSuccess);
        place.copy_back();
        EXPECT_EQ(floats(fused), floats(two_ops)) << num_rows << " " << num_outputs << " " << size;
      }
    }
  }
}

struct RowBlocks {
  int64_t num_rows, num_outputs, size, padding;
};

// Blocks of 128 rows in one launch, pairs of them sharing the weight: a row has the bits that its
// block alone gives it. Of 11952 outputs the last tile has none for the second CTA of a pair, 40
// inputs do not fill the ring, and rows 3 elements apart are not aligned.
TYPED_TEST(LinearKernel, FusedTakesMoreRowsInBlocks) {
  for (const RowBlocks& s : {RowBlocks{225, 11992, 840, 8}, RowBlocks{256, 11952, 840, 3},
                             RowBlocks{480, 11992, 40, 8}, RowBlocks{512, 11952, 840, 8}}) {
    LinearBatch<TypeParam> batch(s.num_rows, 2 * s.num_outputs, s.size);
    DevicePlace place;
    const LinearParams p = batch.params(place, false);
    const int64_t stride = s.num_outputs + s.padding;
    std::vector<TypeParam> together = typed<TypeParam>(std::vector<float>(s.num_rows * stride, 5));
    std::vector<TypeParam> blocks = together;
    LinearSiluMulParams q{p.x,        p.weight,        place(together), s.num_rows, s.num_outputs,
                          s.size,     p.x_stride,      p.weight_stride, stride,     p.dtype};
    ASSERT_TRUE(can_fuse(q));
    ASSERT_EQ(launch_linear_silu_mul(q, nullptr), cudaSuccess);
    TypeParam* const to = place(blocks);
    for (int64_t row = 0; row < s.num_rows; row += gemm::kMaxRows) {
      q.x = static_cast<const TypeParam*>(p.x) + row * p.x_stride;
      q.output = to + row * stride;
      q.num_rows = std::min<int64_t>(s.num_rows - row, gemm::kMaxRows);
      ASSERT_EQ(launch_linear_silu_mul(q, nullptr), cudaSuccess);
    }
    place.copy_back();
    EXPECT_EQ(floats(together), floats(blocks)) << s.num_rows;
  }
}

// Lets its successor start at once and writes x late: a product that did not wait would read the old.
template <typename T>
__global__ void slowly_scale(T* x, const T* from, int64_t count, float factor) {
  let_successor_start();
  const long long start = clock64();
  while (clock64() - start < 20000) continue;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
    x[i] = from_float<T>(to_float(from[i]) * factor);
}

// x, y = x W^T, z = y W^T and again: every product reads what the kernel right before it wrote.
TYPED_TEST(LinearKernel, WaitsForItsPredecessor) {
  constexpr int kRepeats = 16;
  constexpr int64_t kSize = 1024;
  LinearBatch<TypeParam> batch(16, kSize, kSize, 0);
  std::vector<TypeParam> source = batch.x, y(batch.output.size()), first, second;
  DevicePlace place;
  LinearParams to_y = batch.params(place, false);
  TypeParam* const from = place(source);
  TypeParam* const x = static_cast<TypeParam*>(const_cast<void*>(to_y.x));
  void* const z = to_y.output;
  to_y.output = place(y);
  LinearParams to_z = to_y;
  to_z.x = to_y.output, to_z.output = z;
  std::vector<std::vector<TypeParam>> results(2 * kRepeats, batch.output);
  std::vector<TypeParam*> kept;
  for (auto& result : results) kept.push_back(place(result));
  const auto step = [&](int i, bool alone) {
    const float factor = i % 2 == 0 ? 1.0f : -0.5f;
    slowly_scale<<<1, 256>>>(x, from, 16 * kSize, factor);
    if (alone) ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(launch_linear(to_y, nullptr), cudaSuccess);
    if (alone) ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(launch_linear(to_z, nullptr), cudaSuccess);
    if (alone) ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    cudaMemcpyAsync(kept[alone ? kRepeats + i : i], z, 16 * kSize * 2, cudaMemcpyDeviceToDevice);
  };
  for (int i = 0; i < kRepeats; ++i) step(i, false);
  for (int i = 0; i < kRepeats; ++i) step(i, true);
  place.copy_back();
  for (int i = 0; i < kRepeats; ++i)
    EXPECT_EQ(floats(results[i]), floats(results[kRepeats + i])) << "step " << i;
  EXPECT_NE(floats(results[0]), floats(results[1]));
}

}  // namespace
}  // namespace dflash::test
