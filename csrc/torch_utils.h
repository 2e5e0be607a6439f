// SPDX-License-Identifier: Apache-2.0
// What ops/*.cpp need of torch: checks that name the tensor, dtypes, and one way to launch on either device.
// Each ops/<op>.cpp is compiled twice: into libdflash_ops (CPU) and, with DFLASH_CUDA, into libdflash_cuda.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/common/dtype.h"

#ifdef DFLASH_CUDA
#include <cuda_runtime_api.h>

#include "kernels/common/device.h"
#endif

namespace dflash {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The integer and floating types an argument may have, and how a message spells them.
inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Double: return "float64";
    case ScalarType::Short: return "int16";
    default: return "another dtype";
  }
}

inline std::string shape_string(const Tensor& t) {
  std::ostringstream out;
  out << "[";
  for (int64_t i = 0; i < t.dim(); ++i) out << (i ? ", " : "") << t.size(i);
  out << "]";
  return out.str();
}

// -1 matches any size.
inline std::string shape_string(std::initializer_list<int64_t> shape) {
  std::ostringstream out;
  const char* separator = "";
  out << "[";
  for (int64_t size : shape) {
    out << separator;
    if (size < 0) out << "*";
    else out << size;
    separator = ", ";
  }
  out << "]";
  return out.str();
}

// -1 in `expected` matches any size. A step checks hundreds of tensors: no string is made for a good one.
inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> expected) {
  bool same = t.dim() == static_cast<int64_t>(expected.size());
  int64_t i = 0;
  for (int64_t size : expected) {
    if (!same) break;
    same = size < 0 || t.size(i) == size;
    ++i;
  }
  STD_TORCH_CHECK(same, name, ": expected shape ", shape_string(expected), ", got ", shape_string(t));
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType expected) {
  STD_TORCH_CHECK(t.scalar_type() == expected, name, ": expected ", dtype_name(expected), ", got ",
                  dtype_name(t.scalar_type()));
}

inline void check_floating(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, name,
                  ": expected float32, float16 or bfloat16, got ", dtype_name(type));
}

inline void check_last_dim_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, name,
                  ": the last dimension must be contiguous, got stride ", t.stride(t.dim() - 1));
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, ": must be contiguous");
}

inline void check_same_device(const Tensor& t, const char* name, const Tensor& other) {
  STD_TORCH_CHECK(t.device().type() == other.device().type() && t.get_device_index() == other.get_device_index(),
                  name, ": must be on the device of the other arguments");
}

// shape, dtype, last-dim contiguity and device in one line, for the ordinary argument.
inline void check_tensor(const Tensor& t, const char* name, std::initializer_list<int64_t> shape, ScalarType dtype,
                         const Tensor& device_of) {
  check_shape(t, name, shape);
  check_dtype(t, name, dtype);
  check_last_dim_contiguous(t, name);
  check_same_device(t, name, device_of);
}

inline DType to_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3;
    default: STD_TORCH_CHECK(false, "unsupported dtype ", dtype_name(t.scalar_type()));
  }
  return DType::kFloat32;
}

template <typename T>
T* data_ptr(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

template <typename T>
T* data_ptr(const std::optional<Tensor>& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

#ifdef DFLASH_CUDA

inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Runs launch_<op>(params, stream) on the tensor's device and checks it.
#define DFLASH_LAUNCH(op, params, tensor)                                              \
  do {                                                                                 \
    torch::stable::accelerator::DeviceGuard dflash_guard((tensor).get_device_index()); \
    STD_TORCH_CHECK(::dflash::device_is_supported(), ::dflash::unsupported_device_message()); \
    STD_CUDA_CHECK(::dflash::launch_##op(params, ::dflash::current_stream(tensor)));   \
  } while (0)
#define DFLASH_DISPATCH_KEY CUDA

#else

// Runs the CPU twin.
#define DFLASH_LAUNCH(op, params, tensor) ::dflash::cpu::op(params)
#define DFLASH_DISPATCH_KEY CPU

#endif

// Registers a torch-facing function of the same name for the device this file is compiled for.
#define DFLASH_REGISTER(op) DFLASH_REGISTER_FOR(DFLASH_DISPATCH_KEY, op)
#define DFLASH_REGISTER_FOR(key, op) DFLASH_REGISTER_EXPANDED(key, op)
#define DFLASH_REGISTER_EXPANDED(key, op) \
  STABLE_TORCH_LIBRARY_IMPL(dflash, key, m) { m.impl(#op, TORCH_BOX(&::dflash::op)); }

}  // namespace dflash
