// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear.h"

#include <algorithm>

#include "torch_utils.h"

namespace dflash {
namespace {

// What a 16-bit product sums up to, before it is rounded.
void library_sums(const Tensor& x, const Tensor& weight, const Tensor& output) {
  const Tensor columns = torch::stable::transpose(weight, 0, 1);
#ifdef DFLASH_CUDA
  using torch::stable::detail::from;
  StableIValue stack[] = {from(x), from(columns), from(ScalarType::Float), from(output)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype_out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the returned reference
#else
  // No such product on a CPU: the weight in fp32, a part of it at a time.
  constexpr int64_t kPart = 4096;
  const Tensor rows = torch::stable::to(x, ScalarType::Float);
  for (int64_t begin = 0; begin < weight.size(0); begin += kPart) {
    const int64_t count = std::min(kPart, weight.size(0) - begin);
    Tensor part = torch::stable::narrow(const_cast<Tensor&>(columns), 1, begin, count);
    Tensor to = torch::stable::narrow(const_cast<Tensor&>(output), 1, begin, count);
    const Tensor part_in_fp32 = torch::stable::to(part, ScalarType::Float);
    torch::stable::copy_(to, torch::stable::matmul(rows, part_in_fp32));
  }
#endif
}

// The library's GEMM of the tensors' device.
void library_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& output) {
  using torch::stable::detail::from;
  StableIValue stack[] = {from(x), from(weight), from(bias), from(output)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack, TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[0]);  // takes the returned reference
}

#ifdef DFLASH_CUDA
bool is_hopper(const Tensor& x) { return device_properties(x.get_device_index()).major == 9; }

bool streams_weights(const Tensor& x, const LinearParams& p) { return is_hopper(x) && gemm::can_stream(p.operands()); }
#else
// Past this many rows packing the weights pays.
constexpr int64_t kMaxStreamedRows = 32;

bool streams_weights(const Tensor&, const LinearParams& p) {
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
  const bool writes_float =
      output.scalar_type() == ScalarType::Float && x.scalar_type() != ScalarType::Float;
  STD_TORCH_CHECK(!writes_float || !bias.has_value(),
                  "bias: not with a float32 output of 16-bit x");
  check_tensor(output, "output", {num_rows, num_outputs},
               writes_float ? ScalarType::Float : x.scalar_type(), x);
  if (num_rows == 0 || num_outputs == 0) return;

  const LinearParams params{x.data_ptr(), weight.data_ptr(), data_ptr<void>(bias), output.data_ptr(),
                            num_rows,     num_outputs,       size,                 x.stride(0),
                            weight.stride(0), output.stride(0), to_dtype(x), writes_float};
  if (!streams_weights(x, params)) {
    return writes_float ? library_sums(x, weight, output) : library_linear(x, weight, bias, output);
  }
  DFLASH_LAUNCH(linear, params, x);
}

std::vector<int64_t> linear_plan(const Tensor& x, const Tensor& weight) {
  check_shape(x, "x", {-1, -1});
  check_tensor(weight, "weight", {-1, x.size(1)}, x.scalar_type(), x);
#ifdef DFLASH_CUDA
  const gemm::Operands operands{x.data_ptr(), weight.data_ptr(), x.size(0),        weight.size(0),
                                x.size(1),    x.stride(0),       weight.stride(0), to_dtype(x)};
  const gemm::Choice choice = gemm::choose(operands);
  if (is_hopper(x) && choice.rows > 0) return {choice.rows, choice.warpgroups, choice.splits};
#endif
  return {};
}

}  // namespace dflash

DFLASH_REGISTER(linear)
DFLASH_REGISTER(linear_plan)
