// SPDX-License-Identifier: Apache-2.0
// Tokens of the kernel that makes no logits, beside the sampler's twin on linear's sums in fp32.
#include "kernels/lm_head_sample.h"

#include <gtest/gtest.h>

#include "../typed.h"
#include "device_place.h"
#include "kernels/linear.h"
#include "late.h"

namespace dflash::test {
namespace {

constexpr int64_t kPadding = 20;  // rows of the head past the vocabulary; they would always win

template <typename T>
struct HeadBatch {
  int64_t num_rows, vocab_size, size, stride;
  std::vector<T> hidden, weight;
  std::vector<float> temperatures;
  std::vector<int64_t> positions, seeds, d2t, tokens;
  std::vector<int32_t> states, start_loc;

  // Draft rows on states of their own, every fifth padded; or verified rows: requests of 3. Rows of
  // nobody are NaN.
  HeadBatch(int64_t num_rows, int64_t vocab_size, int64_t size, bool verified, bool reduced)
      : num_rows(num_rows), vocab_size(vocab_size), size(size), stride(size + 8) {
    UniformValues random(17);
    hidden = typed<T>(random(num_rows * stride));
    std::vector<float> w = random((vocab_size + kPadding) * size);
    for (float& value : w) value /= std::sqrt(static_cast<float>(size));
    for (int64_t k = vocab_size * size; k < static_cast<int64_t>(w.size()); ++k) w[k] *= 1e3f;
    weight = typed<T>(w);
    tokens.assign(num_rows, 77);
    for (int64_t i = 0; i < num_rows; ++i) {
      positions.push_back(10 + i * 37 % 1000);
      seeds.push_back(i * 123456789 - 5);
      temperatures.push_back(i % 3 == 0 ? 0.0f : 0.4f * static_cast<float>(i % 3));
    }
    const int64_t req_rows = verified ? 3 : 1, num_reqs = (num_rows + req_rows - 1) / req_rows;
    for (int64_t i = 0; i < num_rows; ++i) {
      if (i / req_rows % 5 == 4)
        std::fill_n(hidden.begin() + i * stride, stride, from_float<T>(std::nanf("")));
    }
    for (int64_t i = 0; i < num_reqs; ++i)
      states.push_back(i % 5 == 4 ? -1 : static_cast<int32_t>(num_reqs - 1 - i));
    for (int64_t i = 0; verified && i <= num_reqs; ++i)
      start_loc.push_back(static_cast<int32_t>(std::min(3 * i, num_rows)));
    for (int64_t k = 0; reduced && k < vocab_size; ++k) d2t.push_back(k < vocab_size / 2 ? 3 : 90);
  }

  template <typename Place>
  LmHeadSampleParams params(Place&& place, bool with_temperatures) {
    LmHeadSampleParams p{};
    p.head = {place(hidden), place(weight), num_rows, vocab_size + kPadding,
              size,          stride,        size,     kDType<T>};
    SampleDraftParams& s = p.sample;
    s.sample_positions = place(positions);
    s.sample_idx_mapping = place(states);
    s.logits_start_loc = start_loc.empty() ? nullptr : place(start_loc);
    s.temperatures = with_temperatures ? place(temperatures) : nullptr;
    s.seeds = place(seeds);
    s.d2t = d2t.empty() ? nullptr : place(d2t);
    s.draft_tokens = place(tokens);
    s.num_rows = num_rows;
    s.num_reqs = static_cast<int64_t>(states.size());
    s.num_states = num_rows;
    s.num_drafts = 1;
    s.vocab_size = vocab_size;
    s.draft_tokens_stride = 1;
    s.logit_scale = 0.75f;
    return p;
  }
};

template <typename T>
std::vector<float> sums(const HeadBatch<T>& batch) {
  HeadBatch<T> b = batch;
  const int64_t outputs = b.vocab_size + kPadding;
  std::vector<float> output(b.num_rows * outputs, 5);
  DevicePlace place;
  const LinearParams p{place(b.hidden), place(b.weight), nullptr,  place(output),
                       b.num_rows,      outputs,         b.size,   b.stride,
                       b.size,          outputs,         kDType<T>, true};
  EXPECT_EQ(launch_linear(p, nullptr), cudaSuccess);
  place.copy_back();
  return output;
}

template <typename T>
std::vector<int64_t> twin(const HeadBatch<T>& batch, const std::vector<float>& logits,
                          bool with_temperatures) {
  HeadBatch<T> b = batch;
  SampleDraftParams p = b.params([](auto& v) { return v.data(); }, with_temperatures).sample;
  p.logits = logits.data();
  p.logits_stride = b.vocab_size + kPadding;
  p.dtype = DType::kFloat32;
  cpu::sample_draft(p);
  return b.tokens;
}

// The workspace holds `poison` before.
template <typename T>
std::vector<int64_t> run(const HeadBatch<T>& batch, bool with_temperatures, uint8_t poison = 0xff) {
  HeadBatch<T> b = batch;
  DevicePlace place;
  LmHeadSampleParams p = b.params(place, with_temperatures);
  std::vector<uint8_t> scratch(static_cast<size_t>(lm_head_sample_scratch_size(p)), poison);
  p.sample.scratch = place(scratch);
  EXPECT_EQ(launch_lm_head_sample(p, nullptr), cudaSuccess);
  place.copy_back();
  return b.tokens;
}

template <typename T>
class LmHeadSampleKernel : public ::testing::Test {};
using Types = ::testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(LmHeadSampleKernel, Types);

// Tiles of three warpgroups, fewer than the SMs and more; rows of every kernel.
TYPED_TEST(LmHeadSampleKernel, EqualsTwin) {
  for (int64_t num_rows : {1, 16, 29, 57, 128}) {
    for (const auto& [vocab_size, size] :
         {std::pair<int64_t, int64_t>{8450, 72}, {9001, 8}, {26003, 136}}) {
      for (bool verified : {false, true}) {
        const HeadBatch<TypeParam> batch(num_rows, vocab_size, size, verified, false);
        const std::vector<float> logits = sums(batch);
        SCOPED_TRACE(::testing::Message() << num_rows << " " << vocab_size << " " << verified);
        EXPECT_EQ(run(batch, true), twin(batch, logits, true));
        EXPECT_EQ(run(batch, false), twin(batch, logits, false));
      }
    }
  }
}

TYPED_TEST(LmHeadSampleKernel, EqualsTwinWithAReducedVocabulary) {
  for (int64_t num_rows : {5, 40}) {
    const HeadBatch<TypeParam> batch(num_rows, 8999, 264, false, true);
    const std::vector<float> logits = sums(batch);
    EXPECT_EQ(run(batch, true), twin(batch, logits, true));
    EXPECT_EQ(run(batch, false), twin(batch, logits, false));
  }
}

TYPED_TEST(LmHeadSampleKernel, DoesNotDependOnWhatTheWorkspaceHeld) {
  const HeadBatch<TypeParam> batch(70, 8999, 72, true, false);
  const std::vector<int64_t> first = run(batch, true);
  for (int i = 0; i < 20; ++i)
    EXPECT_EQ(run(batch, true, static_cast<uint8_t>(i * 13)), first);
}

// Whichever of its inputs the kernel right before writes.
TYPED_TEST(LmHeadSampleKernel, ReadsWhatWasWritten) {
  for (bool verified : {false, true}) {
    const HeadBatch<TypeParam> batch(29, 8999, 72, verified, false);
    const std::vector<int64_t> expected = run(batch, true);
    for (int late = 0; late < (verified ? 6 : 5); ++late) {
      HeadBatch<TypeParam> b = batch, source = batch;
      DevicePlace place;
      LmHeadSampleParams p = b.params(place, true);
      std::vector<uint8_t> scratch(static_cast<size_t>(lm_head_sample_scratch_size(p)), 0xff);
      p.sample.scratch = place(scratch);
      const auto* hidden = static_cast<const TypeParam*>(p.head.x);
      if (late == 0) write_late(place, hidden, source.hidden, 0xff);
      if (late == 1) write_late(place, p.sample.sample_positions, source.positions, 0xff);
      if (late == 2) write_late(place, p.sample.sample_idx_mapping, source.states, 0xff);
      if (late == 3) write_late(place, p.sample.temperatures, source.temperatures, 0);
      if (late == 4) write_late(place, p.sample.seeds, source.seeds, 0);
      if (late == 5)
        write_late(place, p.sample.logits_start_loc, source.start_loc, 0);
      ASSERT_EQ(launch_lm_head_sample(p, nullptr), cudaSuccess);
      place.copy_back();
      EXPECT_EQ(b.tokens, expected) << "late: " << late;
    }
  }
}

TYPED_TEST(LmHeadSampleKernel, RefusesWhatItCannotFuse) {
  HeadBatch<TypeParam> batch(4, 8999, 64, false, false);
  DevicePlace place;
  const LmHeadSampleParams good = batch.params(place, true);
  LmHeadSampleParams bad = good;
  bad.head.num_outputs = bad.sample.vocab_size = 8448;
  EXPECT_EQ(launch_lm_head_sample(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.head.num_rows = 129;
  EXPECT_EQ(launch_lm_head_sample(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.head.dtype = DType::kFloat32;
  EXPECT_EQ(launch_lm_head_sample(bad, nullptr), cudaErrorInvalidValue);
  bad = good, bad.sample.draft_logits = place(batch.tokens);
  EXPECT_EQ(launch_lm_head_sample(bad, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace dflash::test
