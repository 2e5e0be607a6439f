// SPDX-License-Identifier: Apache-2.0
#include "kernels/advance.h"

#include "kernels/common/advance_row.h"

namespace dflash::cpu {

void advance(const AdvanceParams& params) {
  const int64_t step = *params.step;
  for (int32_t r = 0; r < params.num_reqs; ++r) {
    for (int32_t c = 0; c < params.num_columns; ++c) advance_ring_token(params, step, r, c);
    advance_row(params, step, r);
  }
  *params.step = step + 1;
}

}  // namespace dflash::cpu
