// SPDX-License-Identifier: Apache-2.0
#include "kernels/build_query.h"

#include "kernels/common/query_row.h"

namespace dflash::cpu {

void build_query(const BuildQueryParams& params) {
  for (int32_t row = 0; row < params.num_context_rows; ++row) build_context_row(params, row);
  const int32_t last = params.num_output_reqs * params.num_query_per_req;
  for (int32_t row = 0; row <= last; ++row) build_query_row(params, row);
}

}  // namespace dflash::cpu
