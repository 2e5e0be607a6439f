// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear_silu_mul_fp8.h"

#include "fp8_operands.h"

namespace dflash {

void silu_mul(const Tensor& gate_up, Tensor output);

void linear_silu_mul_fp8(const Tensor& x, const Tensor& weight, const Tensor& scale, Tensor output) {
  check_fp8_operands(x, weight, scale);
  STD_TORCH_CHECK(scale.size(0) % 16 == 0, "scale: expected 8 of gate and 8 of up in turns, got ", scale.size(0));
  const int64_t num_rows = x.size(0), num_outputs = scale.size(0) / 2;
  check_tensor(output, "output", {num_rows, num_outputs}, x.scalar_type(), x);
  if (num_rows == 0 || num_outputs == 0) return;

#ifdef DFLASH_CUDA
  const LinearFp8Params params = fp8_params(x, weight, scale, std::nullopt, output);
  if (streams_weights(x, params)) {
    DFLASH_LAUNCH(linear_silu_mul_fp8, params, x);
    return;
  }
#endif
  // 8 of gate and 8 of up in turns: rows of 16.
  const int64_t num_turns = num_rows * num_outputs / 8;
  const Tensor gate_up = torch::stable::new_empty(x, {num_rows, 2 * num_outputs});
  const Tensor products = output.is_contiguous() ? output : torch::stable::new_empty(x, {num_rows, num_outputs});
  linear_fp8(x, weight, scale, std::nullopt, gate_up);
  silu_mul(torch::stable::view(gate_up, {num_turns, 16}), torch::stable::view(products, {num_turns, 8}));
  if (!output.is_contiguous()) torch::stable::copy_(output, products);
}

}  // namespace dflash

DFLASH_REGISTER(linear_silu_mul_fp8)
