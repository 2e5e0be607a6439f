// SPDX-License-Identifier: Apache-2.0
// What the products with packed e4m3 weights ask of their operands, and where they stream them.
#pragma once

#include "kernels/linear_fp8.h"
#include "torch_utils.h"

namespace dflash {

void linear_fp8(const Tensor& x, const Tensor& weight, const Tensor& scale, std::optional<Tensor> bias, Tensor output);

inline void check_fp8_operands(const Tensor& x, const Tensor& weight, const Tensor& scale) {
  check_shape(x, "x", {-1, -1});
  check_floating(x, "x");
  check_last_dim_contiguous(x, "x");
  check_tensor(scale, "scale", {-1}, ScalarType::Float, x);
  check_contiguous(scale, "scale");
  const int64_t groups = fp8::num_tiles(scale.size(0)), atoms = fp8::num_tiles(x.size(1));
  check_tensor(weight, "weight", {groups, atoms, fp8::kTileBytes}, ScalarType::Float8_e4m3fn, x);
  check_contiguous(weight, "weight");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(weight.data_ptr()) % 16 == 0,
                  "weight: expected an address of whole 16 bytes");
}

// num_outputs counts the rows of the weight.
inline LinearFp8Params fp8_params(const Tensor& x, const Tensor& weight, const Tensor& scale,
                                  const std::optional<Tensor>& bias, const Tensor& output) {
  LinearFp8Params p;
  p.x = x.data_ptr(), p.x_stride = x.stride(0);
  p.weight = data_ptr<uint8_t>(weight), p.scale = data_ptr<float>(scale), p.bias = data_ptr<void>(bias);
  p.output = output.data_ptr(), p.output_stride = output.stride(0);
  p.num_rows = x.size(0), p.num_outputs = scale.size(0), p.size = x.size(1);
  p.dtype = to_dtype(x);
  return p;
}

#ifdef DFLASH_CUDA
inline bool streams_weights(const Tensor& x, const LinearFp8Params& p) {
  return device_properties(x.get_device_index()).major == 9 && gemm::can_stream(p.operands());
}
#endif

}  // namespace dflash
