// SPDX-License-Identifier: Apache-2.0
// Copies of host vectors on the device, each of exactly its size, so that memcheck sees a write
// past any of them.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

namespace dflash::test {

class DevicePlace {
 public:
  DevicePlace() = default;
  DevicePlace(const DevicePlace&) = delete;
  DevicePlace& operator=(const DevicePlace&) = delete;
  ~DevicePlace() {
    for (const Copy& copy : copies_) cudaFree(copy.device);
  }

  template <typename T>
  T* operator()(std::vector<T>& v) {
    if (v.empty()) return nullptr;
    void* device = nullptr;
    const size_t bytes = v.size() * sizeof(T);
    EXPECT_EQ(cudaMalloc(&device, bytes), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(device, v.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    copies_.push_back({device, v.data(), bytes});
    return static_cast<T*>(device);
  }

  // Waits for the device and overwrites the host vectors with what it left.
  void copy_back() {
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const Copy& copy : copies_) {
      ASSERT_EQ(cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost),
                cudaSuccess);
    }
  }

 private:
  struct Copy {
    void* device;
    void* host;
    size_t bytes;
  };
  std::vector<Copy> copies_;
};

}  // namespace dflash::test
