// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_silu_mul.h"

#include "torch_utils.h"

namespace dflash {

void linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, Tensor output);
void silu_mul(const Tensor& gate_up, Tensor output);

void linear_silu_mul(const Tensor& x, const Tensor& weight, Tensor output) {
  check_shape(x, "x", {-1, -1});
  check_floating(x, "x");
  check_last_dim_contiguous(x, "x");
  check_tensor(weight, "weight", {-1, x.size(1)}, x.scalar_type(), x);
  STD_TORCH_CHECK(weight.size(0) % 2 == 0, "weight: the number of rows must be even, got ", weight.size(0));
  const int64_t num_rows = x.size(0), num_outputs = weight.size(0) / 2;
  check_tensor(output, "output", {num_rows, num_outputs}, x.scalar_type(), x);
  if (num_rows == 0 || num_outputs == 0) return;

#ifdef DFLASH_CUDA
  const LinearSiluMulParams params{x.data_ptr(), weight.data_ptr(), output.data_ptr(), num_rows,
                                   num_outputs,  x.size(1),         x.stride(0),       weight.stride(0),
                                   output.stride(0), to_dtype(x)};
  if (device_properties(x.get_device_index()).major == 9 && can_fuse(params)) {
    DFLASH_LAUNCH(linear_silu_mul, params, x);
    return;
  }
#endif
  const Tensor gate_up = torch::stable::new_empty(x, {num_rows, 2 * num_outputs});
  linear(x, weight, std::nullopt, gate_up);
  silu_mul(gate_up, output);
}

}  // namespace dflash

DFLASH_REGISTER(linear_silu_mul)
