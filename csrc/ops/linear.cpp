// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear.h"

#include "torch_utils.h"

namespace dflash {
namespace {

// The library's GEMM of the tensors' device.
void library_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& output) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(x), from(weight), from(bias), from(output)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the returned reference
}

#ifndef DFLASH_CUDA
// Past this many rows packing the weights pays.
constexpr int64_t kMaxStreamedRows = 32;

bool streams_weights(const Tensor& x, const Tensor& weight) {
  return x.scalar_type() == ScalarType::Float && x.size(0) <= kMaxStreamedRows && weight.is_contiguous();
}
#endif

}  // namespace

void linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, Tensor output) {
  check_shape(x, "x", {-1, -1});
  check_floating(x, "x");
  check_last_dim_contiguous(x, "x");
  const int64_t num_rows = x.size(0), size = x.size(1);
  check_tensor(weight, "weight", {-1, size}, x.scalar_type(), x);
  const int64_t num_outputs = weight.size(0);
  if (bias.has_value()) {
    check_tensor(*bias, "bias", {num_outputs}, x.scalar_type(), x);
    check_contiguous(*bias, "bias");
  }
  check_tensor(output, "output", {num_rows, num_outputs}, x.scalar_type(), x);
  if (num_rows == 0 || num_outputs == 0) return;

#ifndef DFLASH_CUDA
  if (streams_weights(x, weight)) {
    const LinearParams params{data_ptr<float>(x), data_ptr<float>(weight), data_ptr<float>(bias),
                              data_ptr<float>(output), num_rows, num_outputs, size, x.stride(0), output.stride(0)};
    return cpu::linear(params);
  }
#endif
  library_linear(x, weight, bias, output);
}

}  // namespace dflash

DFLASH_REGISTER(linear)
