// SPDX-License-Identifier: Apache-2.0
// Storage types and their conversion to and from float, the same on host and device.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define DFLASH_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Always inlined: a vectorised clone of a CPU twin must not call the baseline's copy.
#define DFLASH_HOST_DEVICE inline __attribute__((always_inline))
#else
#define DFLASH_HOST_DEVICE inline
#endif

namespace dflash {

enum class DType : int { kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };

struct Half { uint16_t bits; };
struct BFloat16 { uint16_t bits; };
struct Float8E4M3 { uint8_t bits; };

DFLASH_HOST_DEVICE uint32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
#endif
}

DFLASH_HOST_DEVICE float bits_float(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  std::memcpy(&x, &u, sizeof(x));
  return x;
#endif
}

DFLASH_HOST_DEVICE float to_float(float x) { return x; }

DFLASH_HOST_DEVICE float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

DFLASH_HOST_DEVICE float to_float(Half x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  // Scaling by 2^112 rebiases the exponent and normalises subnormals.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 5.192296858534828e33f));
#endif
}

DFLASH_HOST_DEVICE float to_float(Float8E4M3 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const uint32_t magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return bits_float(sign | 0x7fc00000);
  return bits_float(sign | float_bits(bits_float(magnitude << 20) * 1.329227995784916e36f));
#endif
}

template <typename T>
DFLASH_HOST_DEVICE T from_float(float x);

template <>
DFLASH_HOST_DEVICE float from_float<float>(float x) { return x; }

template <>
DFLASH_HOST_DEVICE BFloat16 from_float<BFloat16>(float x) {
#if defined(__CUDA_ARCH__)
  return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t u = float_bits(x);
  if ((u & 0x7fffffff) > 0x7f800000) return BFloat16{0x7fff};
  return BFloat16{static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
#endif
}

template <>
DFLASH_HOST_DEVICE Half from_float<Half>(float x) {
#if defined(__CUDA_ARCH__)
  return Half{__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t u = float_bits(x);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  const uint32_t magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return Half{0x7fff};
  if (magnitude >= 0x477ff000) return Half{static_cast<uint16_t>(sign | 0x7c00)};
  if (magnitude < 0x38800000) {
    // Subnormal: adding 0.5 aligns the mantissa, the addition rounds to nearest even.
    const uint32_t rounded = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000;
    return Half{static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23);
  return Half{static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
}

// Saturates to +-448 (the largest finite value), NaN stays NaN.
template <>
DFLASH_HOST_DEVICE Float8E4M3 from_float<Float8E4M3>(float x) {
#if defined(__CUDA_ARCH__)
  return Float8E4M3{static_cast<uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3))};
#else
  const uint32_t u = float_bits(x);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80);
  const uint32_t magnitude = u & 0x7fffffff;
  if (magnitude > 0x7f800000) return Float8E4M3{static_cast<uint8_t>(sign | 0x7f)};
  if (magnitude >= 0x43e00000) return Float8E4M3{static_cast<uint8_t>(sign | 0x7e)};
  if (magnitude < 0x3c800000) {
    // Subnormal below 2^-6: steps of 2^-9; 2^14 has an ulp of 2^-9.
    const uint32_t rounded = float_bits(bits_float(magnitude) + 16384.0f) - 0x46800000;
    return Float8E4M3{static_cast<uint8_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0x7ffff + ((magnitude >> 20) & 1) - (120u << 23);
  const uint32_t code = rounded >> 20;
  return Float8E4M3{static_cast<uint8_t>(sign | (code > 0x7e ? 0x7e : code))};
#endif
}

// Rounds through the storage type, as a store followed by a load would.
template <typename T>
DFLASH_HOST_DEVICE float round_to(float x) {
  return to_float(from_float<T>(x));
}

}  // namespace dflash

// Runs the body with `scalar_t` bound to the storage type of a model dtype (float32, float16, bfloat16).
#define DFLASH_DISPATCH_FLOATING(dtype, ...)                                             \
  switch (dtype) {                                                                       \
    case ::dflash::DType::kFloat32: { using scalar_t = float; __VA_ARGS__; break; }      \
    case ::dflash::DType::kFloat16: { using scalar_t = ::dflash::Half; __VA_ARGS__; break; } \
    default: { using scalar_t = ::dflash::BFloat16; __VA_ARGS__; break; }                \
  }
