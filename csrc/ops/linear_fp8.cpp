// SPDX-License-Identifier: Apache-2.0
#include "fp8_operands.h"

#include <algorithm>

namespace dflash {

void linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, Tensor output);

#ifdef DFLASH_CUDA
namespace {

constexpr int64_t kPartBytes = 32 << 20;  // of the weight unpacked at once

// linear over the weight in the dtype of x, some rows of it at a time.
void linear_of_parts(const LinearFp8Params& p, const Tensor& x, const std::optional<Tensor>& bias, Tensor output) {
  const int64_t group_bytes = fp8::kTileSize * std::max<int64_t>(1, p.size) * (p.dtype == DType::kFloat32 ? 4 : 2);
  const int64_t groups = std::max<int64_t>(1, kPartBytes / group_bytes);
  const int64_t most = std::min(groups * fp8::kTileSize, p.num_outputs);
  for (int64_t first = 0; first < p.num_outputs; first += most) {
    const int64_t count = std::min(most, p.num_outputs - first);
    const Tensor part = torch::stable::new_empty(x, {count, p.size});
    {
      torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
      STD_TORCH_CHECK(device_is_supported(), unsupported_device_message());
      STD_CUDA_CHECK(launch_unpack_fp8(p, first, count, part.data_ptr(), current_stream(x)));
    }
    std::optional<Tensor> part_of_bias;
    if (bias.has_value()) {
      Tensor whole = *bias;
      part_of_bias = torch::stable::narrow(whole, 0, first, count);
    }
    linear(x, part, part_of_bias, torch::stable::narrow(output, 1, first, count));
  }
}

}  // namespace
#endif

void linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& scale, std::optional<Tensor> bias,
                Tensor output) {
  check_fp8_operands(x, weight, scale);
  const int64_t num_rows = x.size(0), num_outputs = scale.size(0);
  if (bias.has_value()) {
    check_tensor(*bias, "bias", {num_outputs}, x.scalar_type(), x);
    check_contiguous(*bias, "bias");
  }
  check_tensor(output, "output", {num_rows, num_outputs}, x.scalar_type(), x);
  if (num_rows == 0 || num_outputs == 0) return;

  const LinearFp8Params params = fp8_params(x, weight, scale, bias, output);
#ifdef DFLASH_CUDA
  if (!streams_weights(x, params)) return linear_of_parts(params, x, bias, output);
#endif
  DFLASH_LAUNCH(linear_fp8, params, x);
}

}  // namespace dflash

DFLASH_REGISTER(linear_fp8)
