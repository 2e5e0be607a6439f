// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/gemm_plan.h"
#include "sample_draft.h"

namespace dflash {

struct LmHeadSampleParams {
  gemm::Operands head;       // x: hidden states; weight: all rows of the head, padding too
  SampleDraftParams sample;  // no logits, no record; scratch: lm_head_sample_scratch_size bytes
};

// Columns past the vocabulary are not even read where whole tiles of them are.
inline gemm::Operands known_part(const LmHeadSampleParams& p) {
  gemm::Operands o = p.head;
  o.num_outputs = p.sample.vocab_size;
  return o;
}

// The GEMM that samples in its epilogue, with a short kernel behind it: a vocabulary wide enough
// for tiles of three warpgroups, where K is one sum. Its order is linear's on at most 128 rows.
inline gemm::Choice choose(const LmHeadSampleParams& p) {
  if (p.sample.draft_logits != nullptr) return {};
  if (gemm::takes_row_blocks(known_part(p))) return {gemm::kMaxRows, 3, 1};
  const gemm::Choice choice = gemm::choose(p.head);
  return choice.warpgroups == 3 ? choice : gemm::Choice{};
}

inline bool can_fuse(const LmHeadSampleParams& p) { return choose(p).rows > 0; }

#ifdef DFLASH_CUDA
int64_t lm_head_sample_scratch_size(const LmHeadSampleParams& params);

// sm_90, within can_fuse; else cudaErrorInvalidValue.
cudaError_t launch_lm_head_sample(const LmHeadSampleParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
