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

// 128 rows a call.
template <typename T>
std::vector<float> sums(const HeadBatch<T>& batch) {
  HeadBatch<T> b = batch;
  const int64_t outputs = b.vocab_size + kPadding;
  std::vector<float> output(b.num_rows * outputs, 5);
  DevicePlace place;
  const T *const x = place(b.hidden), *const weight = place(b.weight);
  float* const to = place(output);
  for (int64_t row = 0; row < b.num_rows; row += gemm::kMaxRows) {
    const int64_t count = std::min<int64_t>(b.num_rows - row, gemm::kMaxRows);
    const LinearParams p{x + row * b.stride, weight,  nullptr,   to + row * outputs,
                         count,              outputs, b.size,    b.stride,
                         b.size,             outputs, kDType<T>, true};
    EXPECT_EQ(launch_linear(p, nullptr), cudaSuccess);
  }
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

struct Sampled {
  std::vector<int64_t> tokens;
  std::vector<uint64_t> keys;  // of the rows' maxima, all bits of them
};

// At most block_rows rows a call.
template <typename T>
Sampled run_in_blocks(const HeadBatch<T>& batch, bool with_temperatures, int64_t block_rows) {
  Sampled sampled{batch.tokens, {}};
  for (int64_t row = 0; row < batch.num_rows; row += block_rows) {
    HeadBatch<T> b = batch;
    b.tokens = sampled.tokens;
    for (int32_t& start : b.start_loc) start -= static_cast<int32_t>(row);
    DevicePlace place;
    LmHeadSampleParams p = b.params(place, with_temperatures);
    p.head.x = static_cast<const T*>(p.head.x) + row * b.stride;
    p.sample.sample_positions += row;
    if (b.start_loc.empty()) p.sample.sample_idx_mapping += row;
    else p.sample.draft_tokens += row;
    const int64_t count = std::min(b.num_rows - row, block_rows);
    p.head.num_rows = p.sample.num_rows = count;
    const size_t size = lm_head_sample_scratch_size(p) / sizeof(uint64_t);
    std::vector<uint64_t> keys(size, ~uint64_t{0});
    p.sample.scratch = place(keys);
    EXPECT_EQ(launch_lm_head_sample(p, nullptr), cudaSuccess);
    place.copy_back();
    sampled.tokens = b.tokens;
    for (auto from = keys.begin(); from != keys.end(); from += size / count)
      sampled.keys.push_back(*std::max_element(from, from + size / count));
  }
  return sampled;
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

// Blocks of 128 rows in one launch, pairs of them sharing the weight: a row has the bits that its
// block alone gives it. The last tile has no columns for the second CTA of a pair, or some; every
// CTA has two tiles (four of two block pairs), or some have fewer; 8 inputs do not fill the ring.
TYPED_TEST(LmHeadSampleKernel, TakesMoreRowsInBlocks) {
  for (int64_t num_rows : {226, 240, 256, 449, 512}) {
    for (const auto& [vocab_size, size] :
         {std::pair<int64_t, int64_t>{131 * 192 + 61, 72}, {124 * 192 + 150, 392}, {24001, 8}}) {
      for (bool verified : {false, true}) {
        const HeadBatch<TypeParam> batch(num_rows, vocab_size, size, verified, false);
        const std::vector<float> logits = sums(batch);
        for (bool with_temperatures : {false, true}) {
          SCOPED_TRACE(::testing::Message() << num_rows << " rows of " << vocab_size << ", verified "
                                            << verified << ", sampled " << with_temperatures);
          const Sampled together = run_in_blocks(batch, with_temperatures, num_rows);
          EXPECT_EQ(together.tokens, twin(batch, logits, with_temperatures));
          const Sampled blocks = run_in_blocks(batch, with_temperatures, gemm::kMaxRows);
          EXPECT_EQ(together.tokens, blocks.tokens);
          EXPECT_EQ(together.keys, blocks.keys);
        }
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
  for (const auto& [num_rows, vocab_size] : {std::pair<int64_t, int64_t>{70, 8999}, {480, 24001}}) {
    const HeadBatch<TypeParam> batch(num_rows, vocab_size, 72, true, false);
    for (bool with_temperatures : {false, true}) {
      const std::vector<int64_t> first = run(batch, with_temperatures);
      for (int i = 0; i < 20; ++i)
        EXPECT_EQ(run(batch, with_temperatures, static_cast<uint8_t>(i * 13)), first);
    }
  }
}

// Whichever of its inputs the kernel right before writes.
TYPED_TEST(LmHeadSampleKernel, ReadsWhatWasWritten) {
  for (int i = 0; i < 8; ++i) {
    const bool verified = i % 2 == 1, in_blocks = i / 2 % 2 == 1, with_temperatures = i / 4 == 1;
    const HeadBatch<TypeParam> batch(in_blocks ? 240 : 29, in_blocks ? 24001 : 8999, 72, verified,
                                     false);
    const std::vector<int64_t> expected = run(batch, with_temperatures);
    for (int late = 0; late < (verified ? 6 : 5); ++late) {
      if (late == 3 && !with_temperatures) continue;
      HeadBatch<TypeParam> b = batch, source = batch;
      DevicePlace place;
      LmHeadSampleParams p = b.params(place, with_temperatures);
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
      EXPECT_EQ(b.tokens, expected) << "late: " << late << ", case " << i;
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
