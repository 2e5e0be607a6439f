// SPDX-License-Identifier: Apache-2.0
#include "kernels/add_rms_norm.h"

#include "torch_utils.h"

namespace dflash {

void add_rms_norm(const std::optional<Tensor>& x, Tensor residual, const Tensor& weight, double eps,
                  Tensor output, const std::optional<Tensor>& tap) {
  check_shape(residual, "residual", {-1, -1});
  check_floating(residual, "residual");
  check_last_dim_contiguous(residual, "residual");
  const int64_t num_rows = residual.size(0);
  const int64_t size = residual.size(1);
  const ScalarType dtype = residual.scalar_type();
  if (x.has_value()) check_tensor(*x, "x", {num_rows, size}, dtype, residual);
  check_tensor(weight, "weight", {size}, dtype, residual);
  check_tensor(output, "output", {num_rows, size}, dtype, residual);
  if (tap.has_value()) check_tensor(*tap, "tap", {num_rows, size}, dtype, residual);
  if (num_rows == 0 || size == 0) return;

  AddRmsNormParams params{};
  params.x = data_ptr<void>(x);
  params.residual = residual.data_ptr();
  params.weight = weight.data_ptr();
  params.output = output.data_ptr();
  params.tap = data_ptr<void>(tap);
  params.num_rows = num_rows;
  params.size = size;
  params.x_stride = x.has_value() ? x->stride(0) : 0;
  params.residual_stride = residual.stride(0);
  params.output_stride = output.stride(0);
  params.tap_stride = tap.has_value() ? tap->stride(0) : 0;
  params.eps = static_cast<float>(eps);
  params.dtype = to_dtype(residual);
  DFLASH_LAUNCH(add_rms_norm, params, residual);
}

}  // namespace dflash

DFLASH_REGISTER(add_rms_norm)
