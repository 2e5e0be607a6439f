// SPDX-License-Identifier: Apache-2.0
#include "kernels/sample_draft.h"

#include "vocabulary.h"

namespace dflash::cpu {
namespace {

void* record_row(const SampleDraftParams& p, const DraftRow& r) {
  if (p.draft_logits == nullptr) return nullptr;
  const int64_t offset = r.state * p.draft_logits_strides[0] + r.column * p.draft_logits_strides[1];
  return const_cast<void*>(element(p.draft_logits, p.draft_logits_dtype, offset));
}

void fill_record(const SampleDraftParams& p, void* record, int64_t begin) {
  DFLASH_DISPATCH_FLOATING(p.draft_logits_dtype, {
    scalar_t* out = static_cast<scalar_t*>(record);
    for (int64_t v = begin; v < p.target_vocab_size; ++v)
      out[v] = from_float<scalar_t>(kNegativeInfinity);
  });
}

// Stores a tile; a sampled row goes on with what was stored, so that the record is what was drawn
// from.
template <typename scalar_t>
DFLASH_INLINE void record_tile(const SampleDraftParams& p, const DraftRow& r, scalar_t* out,
                               int64_t begin, int64_t count, float* x) {
  if (p.d2t == nullptr) {
    for (int64_t i = 0; i < count; ++i) out[begin + i] = from_float<scalar_t>(x[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = target_id(p, begin + i);
      if (is_token(id, p.target_vocab_size)) out[id] = from_float<scalar_t>(x[i]);
    }
  }
  if (r.greedy) return;
  for (int64_t i = 0; i < count; ++i) x[i] = round_to<scalar_t>(x[i]);
}

DFLASH_INLINE void load_target_words(const SampleDraftParams& p, const NoiseKey& noise,
                                     int64_t begin, int64_t count, uint32_t* words) {
  if (p.d2t == nullptr) return load_words(noise, begin, count, words);
  for (int64_t i = 0; i < count; ++i) words[i] = stream_word(noise, target_id(p, begin + i));
}

DFLASH_CPU_CLONES void sample_row(const SampleDraftParams& p, int64_t row) {
  const DraftRow r = draft_row(p, row);
  if (r.state < 0) return;
  const LogitsRow logits{element(p.logits, p.dtype, row * p.logits_stride), p.dtype, p.logit_scale};
  void* record = record_row(p, r);
  if (record != nullptr) fill_record(p, record, p.d2t == nullptr ? p.vocab_size : 0);
  const bool is_verified = p.logits_start_loc != nullptr;
  const float temperature = r.temperature, inv_temperature = r.inv_temperature;
  alignas(64) float x[kTile];
  alignas(64) uint32_t words[kTile];
  FirstMaximum best;
  for (int64_t begin = 0; begin < p.vocab_size; begin += kTile) {
    const int64_t count = tile_size(p.vocab_size, begin);
    load_tile(logits, begin, count, x);
    if (record != nullptr) {
      DFLASH_DISPATCH_FLOATING(p.draft_logits_dtype,
                               record_tile(p, r, static_cast<scalar_t*>(record), begin, count, x));
    }
    if (!r.greedy) {
      load_target_words(p, r.noise, begin, count, words);
      for (int64_t i = 0; i < count; ++i)
        x[i] = race_score(is_verified, temperature, inv_temperature, x[i], words[i]);
    }
    update(best, x, begin, round_to_lanes(count));
  }
  *token_of(p, r, row) = target_id(p, best.index);
}

}  // namespace

void sample_draft(const SampleDraftParams& params) {
  parallel_for(params.num_rows, 1 + 65536 / params.vocab_size, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) sample_row(params, row);
  });
}

}  // namespace dflash::cpu
