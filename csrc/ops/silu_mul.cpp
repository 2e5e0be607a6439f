// SPDX-License-Identifier: Apache-2.0
#include "kernels/silu_mul.h"

#include "torch_utils.h"

namespace dflash {

void silu_mul(const Tensor& gate_up, Tensor output) {
  check_shape(gate_up, "gate_up", {-1, -1});
  check_floating(gate_up, "gate_up");
  check_last_dim_contiguous(gate_up, "gate_up");
  const int64_t num_rows = gate_up.size(0);
  const int64_t size = gate_up.size(1) / 2;
  STD_TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up: the last dimension must be even, got ", gate_up.size(1));
  check_tensor(output, "output", {num_rows, size}, gate_up.scalar_type(), gate_up);
  if (num_rows == 0 || size == 0) return;

  const SiluMulParams params{gate_up.data_ptr(), output.data_ptr(), num_rows,          size,
                             gate_up.stride(0),  output.stride(0),  to_dtype(gate_up)};
  DFLASH_LAUNCH(silu_mul, params, gate_up);
}

}  // namespace dflash

DFLASH_REGISTER(silu_mul)
