// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/gemm_plan.h"
#include "sample_draft.h"

namespace dflash {

struct LmHeadSampleParams {
  gemm::Operands head;       // x: hidden states; weight: all rows of the head, padding too
  SampleDraftParams sample;  // no logits, no record; scratch: lm_head_sample_scratch_size bytes
};

// Whether one kernel and a short one behind it do it: a vocabulary wide enough for tiles of three
// warpgroups, where K is one sum. Its order is linear's.
inline bool can_fuse(const LmHeadSampleParams& p) {
  return gemm::choose(p.head).warpgroups == 3 && p.sample.draft_logits == nullptr;
}

#ifdef DFLASH_CUDA
int64_t lm_head_sample_scratch_size(const LmHeadSampleParams& params);

// sm_90, within can_fuse; else cudaErrorInvalidValue.
cudaError_t launch_lm_head_sample(const LmHeadSampleParams& params, cudaStream_t stream);
#endif

}  // namespace dflash
