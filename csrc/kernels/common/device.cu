// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdio>
#include <mutex>

namespace dflash {
namespace {

constexpr int kMaxDevices = 64;

DeviceProperties query(int device) {
  DeviceProperties p;
  cudaDeviceGetAttribute(&p.major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&p.minor, cudaDevAttrComputeCapabilityMinor, device);
  cudaDeviceGetAttribute(&p.num_sms, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&p.max_smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return p;
}

}  // namespace

const DeviceProperties& device_properties() {
  int device = 0;
  cudaGetDevice(&device);
  return device_properties(device);
}

const DeviceProperties& device_properties(int device) {
  static std::array<DeviceProperties, kMaxDevices> cache;
  static std::array<std::once_flag, kMaxDevices> once;
  std::call_once(once[device], [device] { cache[device] = query(device); });
  return cache[device];
}

bool device_is_supported() {
  const DeviceProperties& p = device_properties();
  return (p.major == 9 && p.minor == 0) || p.major == 10;
}

const char* unsupported_device_message() {
  static thread_local char message[160];
  const DeviceProperties& p = device_properties();
  std::snprintf(message, sizeof(message),
                "dflash: this GPU is sm_%d%d; this build ships kernels for sm_90a (H100, H200) and sm_100f (B200, "
                "B300)", p.major, p.minor);
  return message;
}

}  // namespace dflash
