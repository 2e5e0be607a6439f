// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "../typed.h"
#include "device_place.h"
#include "kernels/common/overlap.h"
#include "kernels/linear_silu_mul_fp8.h"
#include "kernels/silu_mul.h"

namespace dflash::test {
namespace {

// Rows of x and of the output are wider than they need be; what lies between is NaN in x, and must
// stay 5 in the output. The weight has every e4m3 value but NaN.
template <typename T>
struct Fp8Batch {
  int64_t num_rows, num_outputs, size, x_stride, output_stride;
  std::vector<T> x, bias, output;
  std::vector<uint8_t> weight;
  std::vector<float> scale;

  Fp8Batch(int64_t num_rows, int64_t num_outputs, int64_t size, int64_t pad = 8)
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
    bias = typed<T>(random(num_outputs));
    output = typed<T>(std::vector<float>(num_rows * output_stride, 5));
    const int64_t num_atoms = fp8::num_tiles(size);
    weight.resize(fp8::num_tiles(num_outputs) * num_atoms * fp8::kTileBytes);
    uint32_t state = 1;
    for (int64_t row = 0; row < num_outputs; ++row) {
      for (int64_t k = 0; k < size; ++k) {
        state = state * 1664525 + 1013904223;
        const uint8_t byte = static_cast<uint8_t>(state >> 24);
        at(row, k) = (byte & 0x7f) == 0x7f ? 0 : byte;
      }
    }
    for (int64_t row = 0; row < num_outputs; ++row)
      scale.push_back((1 + row % 5) * 2e-3f / std::sqrt(static_cast<float>(size)));
  }

  uint8_t& at(int64_t row, int64_t k) {
    const int64_t tile = row / fp8::kTileSize * fp8::num_tiles(size) + k / fp8::kTileSize;
    return weight[tile * fp8::kTileBytes + fp8::row_offset(static_cast<int>(row % fp8::kTileSize)) +
                  fp8::column_offset(static_cast<int>(k % fp8::kTileSize))];
  }

  template <typename Place>
  LinearFp8Params params(Place&& place, bool with_bias) {
    return {place(x), place(weight), place(scale), with_bias ? place(bias) : nullptr, place(output),
            num_rows, num_outputs,   size,         x_stride,                          output_stride,
            kDType<T>};
  }
};

template <typename T>
std::vector<T> expected(const Fp8Batch<T>& batch, bool with_bias) {
  Fp8Batch<T> b = batch;
  cpu::linear_fp8(b.params([](auto& v) { return v.data(); }, with_bias));
  return b.output;
}

template <typename T>
std::vector<T> run(const Fp8Batch<T>& batch, bool with_bias) {
  Fp8Batch<T> b = batch;
  DevicePlace place;
  EXPECT_EQ(launch_linear_fp8(b.params(place, with_bias), nullptr), cudaSuccess);
  place.copy_back();
  return b.output;
}

template <typename T>
class LinearFp8Kernel : public ::testing::Test {};
using Types = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(LinearFp8Kernel, Types);

TYPED_TEST(LinearFp8Kernel, EqualsTwin) {
  for (int64_t num_rows : {1, 7, 16, 17, 33, 65, 128}) {
    for (int64_t num_outputs : {1, 7, 64, 100, 200}) {
      for (int64_t size : {8, 64, 136, 576}) {
        const Fp8Batch<TypeParam> batch(num_rows, num_outputs, size);
        SCOPED_TRACE(::testing::Message() << num_rows << " " << num_outputs << " " << size);
        expect_near(run(batch, true), expected(batch, true));
      }
    }
  }
}

// Two splits of one to three warpgroups, a ring that turns, more tiles than SMs.
TYPED_TEST(LinearFp8Kernel, EqualsTwinWhereTheRingTurns) {
  for (int64_t num_rows : {3, 24, 57, 128}) {
    const Fp8Batch<TypeParam> split(num_rows, 130, 5128), many(num_rows, 64 * 140 + 24, 328);
    expect_near(run(split, false), expected(split, false));
    expect_near(run(many, true), expected(many, true));
    for (int64_t num_groups : {70, 140}) {
      const Fp8Batch<TypeParam> wide(num_rows, 64 * num_groups + 24, 1096);
      expect_near(run(wide, true), expected(wide, true));
    }
  }
}

TYPED_TEST(LinearFp8Kernel, TakesMoreThan128RowsByTurns) {
  const Fp8Batch<TypeParam> batch(300, 72, 1032);
  expect_near(run(batch, true), expected(batch, true));
}

// A row of x has a single 1: the weight itself comes out, every value of it, subnormals and zeros.
TYPED_TEST(LinearFp8Kernel, WidensEveryValueExactly) {
  Fp8Batch<TypeParam> batch(64, 254, 64, 0);
  std::vector<float> unit(64 * 64, 0.0f);
  for (int i = 0; i < 64; ++i) unit[i * 64 + i] = 1;
  batch.x = typed<TypeParam>(unit);
  batch.scale.assign(254, 1.0f);
  const auto byte_of = [](int64_t row, int64_t k) {
    const int code = static_cast<int>((row + k) % 254);
    return static_cast<uint8_t>(code < 127 ? code : code + 1);
  };
  for (int64_t row = 0; row < 254; ++row)
    for (int64_t k = 0; k < 64; ++k) batch.at(row, k) = byte_of(row, k);
  const std::vector<float> got = floats(run(batch, false));
  for (int64_t k = 0; k < 64; ++k)
    for (int64_t row = 0; row < 254; ++row)
      ASSERT_EQ(got[k * 254 + row], to_float(Float8E4M3{byte_of(row, k)})) << row << " " << k;
}

TYPED_TEST(LinearFp8Kernel, ARowDoesNotDependOnTheOthers) {
  for (const auto& [num_outputs, size] :
       {std::pair<int64_t, int64_t>{100, 2056}, {64 * 68, 1032}, {64 * 133, 264}}) {
    const Fp8Batch<TypeParam> all(128, num_outputs, size);
    const std::vector<float> together = floats(run(all, true));
    for (int64_t num_rows : {1, 5, 16, 31, 64, 100}) {
      Fp8Batch<TypeParam> some = all;
      some.num_rows = num_rows;
      some.x.resize(num_rows * some.x_stride);
      some.output.resize(num_rows * some.output_stride);
      const std::vector<float> alone = floats(run(some, true));
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin())) << num_rows;
    }
  }
}

TYPED_TEST(LinearFp8Kernel, WritesRowsOfAnyAlignment) {
  Fp8Batch<TypeParam> batch(20, 101, 64);
  batch.output_stride = 103;
  batch.output.resize(20 * 103);
  expect_near(run(batch, false), expected(batch, false));
}

TYPED_TEST(LinearFp8Kernel, RefusesWhatItCannotStream) {
  Fp8Batch<TypeParam> batch(4, 8, 64);
  DevicePlace place;
  const LinearFp8Params good = batch.params(place, false);
  LinearFp8Params bad = good;
  bad.x_stride = 65;
  EXPECT_EQ(launch_linear_fp8(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.x = static_cast<const uint8_t*>(good.x) + 2;
  EXPECT_EQ(launch_linear_fp8(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.weight = good.weight + 8;
  EXPECT_EQ(launch_linear_fp8(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.dtype = DType::kFloat32;
  EXPECT_EQ(launch_linear_fp8(bad, nullptr), cudaErrorInvalidValue);
}

TYPED_TEST(LinearFp8Kernel, FusedHasTheBitsOfLinearAndSiluMul) {
  for (int64_t num_rows : {1, 16, 29, 64, 128, 140}) {
    for (int64_t num_outputs : {8, 72, 64 * 36, 64 * 67}) {
      for (int64_t size : {72, 1160}) {
        Fp8Batch<TypeParam> batch(num_rows, 2 * num_outputs, size, 0);
        DevicePlace place;
        const LinearFp8Params p = batch.params(place, false);
        ASSERT_EQ(launch_linear_fp8(p, nullptr), cudaSuccess);
        std::vector<TypeParam> two_ops = typed<TypeParam>(
            std::vector<float>(num_rows * num_outputs, 5)), fused = two_ops;
        // 8 of gate and 8 of up in turns are rows of 16.
        const SiluMulParams silu{p.output, place(two_ops), num_rows * num_outputs / 8, 8, 16, 8,
                                 p.dtype};
        ASSERT_EQ(launch_silu_mul(silu, nullptr), cudaSuccess);
        LinearFp8Params q = p;
        q.output = place(fused), q.output_stride = num_outputs;
        ASSERT_EQ(launch_linear_silu_mul_fp8(q, nullptr), cudaSuccess);
        place.copy_back();
        EXPECT_EQ(floats(fused), floats(two_ops)) << num_rows << " " << num_outputs << " " << size;
      }
    }
  }
  Fp8Batch<TypeParam> batch(1, 24, 64, 0);
  DevicePlace place;
  EXPECT_EQ(launch_linear_silu_mul_fp8(batch.params(place, false), nullptr), cudaErrorInvalidValue);
}

TYPED_TEST(LinearFp8Kernel, UnpacksSomeRows) {
  for (const auto& [num_outputs, size] :
       {std::pair<int64_t, int64_t>{200, 136}, {64, 7}, {65, 64}}) {
    Fp8Batch<TypeParam> batch(1, num_outputs, size);
    for (int64_t first = 0; first < num_outputs; first += 64) {
      const int64_t count = std::min<int64_t>(num_outputs - first, 100);
      std::vector<TypeParam> rows(count * size);
      DevicePlace place;
      ASSERT_EQ(launch_unpack_fp8(batch.params(place, false), first, count, place(rows), nullptr),
                cudaSuccess);
      place.copy_back();
      for (int64_t row = 0; row < count; ++row) {
        for (int64_t k = 0; k < size; ++k) {
          const float value = to_float(Float8E4M3{batch.at(first + row, k)});
          ASSERT_EQ(to_float(rows[row * size + k]),
                    round_to<TypeParam>(value * batch.scale[first + row])) << row << " " << k;
        }
      }
    }
  }
}

// Lets its successor start at once and writes x late: a product that did not wait would read what
// was there before.
template <typename T>
__global__ void slowly_scale(T* x, const T* from, int64_t count, float factor) {
  let_successor_start();
  const long long start = clock64();
  while (clock64() - start < 20000) continue;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
    x[i] = from_float<T>(to_float(from[i]) * factor);
}

// x, y = x W^T, z = y W^T and again: every product reads what the kernel right before it wrote.
TYPED_TEST(LinearFp8Kernel, WaitsForItsPredecessor) {
  constexpr int kRepeats = 16;
  constexpr int64_t kSize = 1024;
  Fp8Batch<TypeParam> batch(16, kSize, kSize, 0);
  std::vector<TypeParam> source = batch.x, y(batch.output.size());
  DevicePlace place;
  LinearFp8Params to_y = batch.params(place, false);
  TypeParam* const from = place(source);
  TypeParam* const x = static_cast<TypeParam*>(const_cast<void*>(to_y.x));
  void* const z = to_y.output;
  to_y.output = place(y);
  LinearFp8Params to_z = to_y;
  to_z.x = to_y.output, to_z.output = z;
  std::vector<std::vector<TypeParam>> results(2 * kRepeats, batch.output);
  std::vector<TypeParam*> kept;
  for (auto& result : results) kept.push_back(place(result));
  const auto step = [&](int i, bool alone) {
    const float factor = i % 2 == 0 ? 1.0f : -0.5f;
    slowly_scale<<<1, 256>>>(x, from, 16 * kSize, factor);
    if (alone) ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(launch_linear_fp8(to_y, nullptr), cudaSuccess);
    if (alone) ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(launch_linear_fp8(to_z, nullptr), cudaSuccess);
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
