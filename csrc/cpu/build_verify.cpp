// SPDX-License-Identifier: Apache-2.0
#include "kernels/build_verify.h"

#include "kernels/common/verify_row.h"

namespace dflash::cpu {

void build_verify(const BuildVerifyParams& params) {
  const int32_t last = params.num_reqs * params.rows_per_req;
  for (int32_t row = 0; row <= last; ++row) build_verify_row(params, row);
}

}  // namespace dflash::cpu
