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

#ifdef DFLASH_CUDA
bool streams_weights(const LinearParams& p) { return device_properties().major == 9 && gemm::can_stream(p.operands()); }
#else
// Past this many rows packing the weights pays.
constexpr int64_t kMaxStreamedRows = 32;

bool streams_weights(const LinearParams& p) {
  return p.dtype == DType::kFloat32 && p.num_rows <= kMaxStreamedRows && p.weight_stride == p.size;
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

  const LinearParams params{x.data_ptr(), weight.data_ptr(), data_ptr<void>(bias), output.data_ptr(),
                            num_rows,     num_outputs,       size,                 x.stride(0),
                            weight.stride(0), output.stride(0), to_dtype(x)};
  if (!streams_weights(params)) return library_linear(x, weight, bias, output);
  DFLASH_LAUNCH(linear, params, x);
}

std::vector<int64_t> linear_plan(const Tensor& x, const Tensor& weight) {
  check_shape(x, "x", {-1, -1});
  check_tensor(weight, "weight", {-1, x.size(1)}, x.scalar_type(), x);
#ifdef DFLASH_CUDA
  const gemm::Operands operands{x.data_ptr(), weight.data_ptr(), x.size(0),        weight.size(0),
                                x.size(1),    x.stride(0),       weight.stride(0), to_dtype(x)};
  const gemm::Choice choice = gemm::choose(operands);
  if (device_properties().major == 9 && choice.rows > 0) return {choice.rows, choice.warpgroups, choice.splits};
#endif
  return {};
}

}  // namespace dflash

DFLASH_REGISTER(linear)
DFLASH_REGISTER(linear_plan)
