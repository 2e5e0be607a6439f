// SPDX-License-Identifier: Apache-2.0
// Kernels whose start overlaps the end of the one before them: behind a kernel that lets its
// successor start at once and then takes its time, they read nothing early and write nothing early.
#include <gtest/gtest.h>

#include "device_place.h"
#include "kernels/add_rms_norm.h"
#include "kernels/qk_norm_rope_store.h"
#include "kernels/silu_mul.h"
#include "kv_batch.h"
#include "late.h"

namespace dflash::test {
namespace {

constexpr int64_t kRows = 16, kSize = 1024;

struct Vectors {
  std::vector<float> input, residual, weight, output;

  explicit Vectors(int64_t columns, int64_t output_columns) {
    UniformValues random(5);
    input = random(kRows * columns);
    residual = random(kRows * kSize);
    weight = random(kSize);
    output.assign(kRows * output_columns, 7);
  }
};

// The op over `input` on the host, and on the device behind a kernel that writes `input` late.
template <typename Twin, typename Launch>
void expect_waits(Vectors host, Twin&& twin, Launch&& launch) {
  Vectors device = host;
  std::vector<float> late(host.input.size(), -3);
  DevicePlace place;
  float* const input = place(late);
  const float* const source = place(device.input);
  float *const residual = place(device.residual), *const weight = place(device.weight);
  float* const output = place(device.output);
  std::vector<float> spare(device.residual), spare_output(device.output);
  // Once before: a kernel is loaded at its first launch, and loading may wait for the device.
  ASSERT_EQ(launch(source, place(spare), weight, place(spare_output)), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  copy_late<<<1, 256>>>(input, source, static_cast<int64_t>(late.size()));
  ASSERT_EQ(launch(input, residual, weight, output), cudaSuccess);
  place.copy_back();
  twin(host.input.data(), host.residual.data(), host.weight.data(), host.output.data());
  expect_near(device.output, host.output);
  expect_near(device.residual, host.residual);
}

AddRmsNormParams norm_params(const float* x, float* residual, const float* weight, float* output) {
  AddRmsNormParams p{};
  p.x = x, p.residual = residual, p.weight = weight, p.output = output;
  p.num_rows = kRows, p.size = kSize;
  p.x_stride = p.residual_stride = p.output_stride = p.tap_stride = kSize;
  p.eps = 1e-5f;
  p.dtype = DType::kFloat32;
  return p;
}

TEST(Overlap, AddRmsNormReadsWhatWasWritten) {
  expect_waits(
      Vectors(kSize, kSize),
      [](const float* x, float* r, const float* w, float* out) {
        cpu::add_rms_norm(norm_params(x, r, w, out));
      },
      [](const float* x, float* r, const float* w, float* out) {
        return launch_add_rms_norm(norm_params(x, r, w, out), nullptr);
      });
}

TEST(Overlap, AddRmsNormWritesBehindItsPredecessor) {
  Vectors v(kSize, kSize);
  const std::vector<float> before = v.residual;
  std::vector<float> kept(before.size());
  DevicePlace place;
  const AddRmsNormParams p =
      norm_params(place(v.input), place(v.residual), place(v.weight), place(v.output));
  AddRmsNormParams spare = p;
  std::vector<float> spare_residual = v.residual;
  spare.residual = place(spare_residual);
  ASSERT_EQ(launch_add_rms_norm(spare, nullptr), cudaSuccess);  // loaded: it cannot wait for that
  float* const late = place(kept);
  copy_late<<<1, 256>>>(late, static_cast<const float*>(p.residual), kRows * kSize);
  ASSERT_EQ(launch_add_rms_norm(p, nullptr), cudaSuccess);
  place.copy_back();
  EXPECT_EQ(kept, before);
  EXPECT_NE(v.residual, before);
}

SiluMulParams silu_params(const float* gate_up, float* output) {
  return {gate_up, output, kRows, kSize, 2 * kSize, kSize, DType::kFloat32};
}

TEST(Overlap, SiluMulReadsWhatWasWritten) {
  expect_waits(
      Vectors(2 * kSize, kSize),
      [](const float* x, float*, const float*, float* out) { cpu::silu_mul(silu_params(x, out)); },
      [](const float* x, float*, const float*, float* out) {
        return launch_silu_mul(silu_params(x, out), nullptr);
      });
}

// One K/V head and two of q, not normed; what it stores is read back from the output: K, then V.
struct Qkv {
  static constexpr int64_t kHeads = 4, kHeadDim = 64, kColumns = kHeads * kHeadDim;
  std::vector<int64_t> positions = make_positions(kRows), slots = make_slots(kRows, kRows);
  std::vector<float> cos_sin = UniformValues(9)(kMaxPositions * kHeadDim);

  template <typename Place>
  QkNormRopeStoreParams params(Place&& place, const float* qkv, float* output) {
    QkNormRopeStoreParams p{};
    p.qkv = qkv, p.qkv_stride = kColumns;
    p.query = output, p.query_row_stride = 2 * kHeadDim, p.query_head_stride = kHeadDim;
    float* const keys = output + kRows * 2 * kHeadDim;
    p.key_cache = KvCache{keys, kRows * kHeadDim, kHeadDim, kHeadDim};
    p.value_cache = KvCache{keys + kRows * kHeadDim, kRows * kHeadDim, kHeadDim, kHeadDim};
    p.positions = place(positions), p.slot_mapping = place(slots);
    p.rope = RopeTable{place(cos_sin), kHeadDim, kHeadDim, true};
    p.num_rows = kRows, p.num_heads = 2, p.num_kv_heads = 1, p.head_dim = kHeadDim;
    p.kv_block_size = kRows, p.value_scale = 1.0f;
    p.dtype = p.cache_dtype = DType::kFloat32;
    return p;
  }
};

TEST(Overlap, QkNormRopeStoreReadsWhatWasWritten) {
  Qkv qkv;
  DevicePlace place;
  const QkNormRopeStoreParams on_device = qkv.params(place, nullptr, nullptr);
  expect_waits(
      Vectors(Qkv::kColumns, Qkv::kColumns),
      [&](const float* x, float*, const float*, float* out) {
        cpu::qk_norm_rope_store(qkv.params([](auto& v) { return v.data(); }, x, out));
      },
      [&](const float* x, float*, const float*, float* out) {
        QkNormRopeStoreParams p = qkv.params([](auto& v) { return v.data(); }, x, out);
        p.positions = on_device.positions, p.slot_mapping = on_device.slot_mapping;
        p.rope = on_device.rope;
        return launch_qk_norm_rope_store(p, nullptr);
      });
}

}  // namespace
}  // namespace dflash::test
