// SPDX-License-Identifier: Apache-2.0
// What the host asks of the current device: cached once per device, thread-safe, never an exit.
#pragma once

namespace dflash {

struct DeviceProperties {
  int major = 0;
  int minor = 0;
  int num_sms = 0;
  int max_smem_per_block = 0;  // opt-in bytes
};

// Of the current device, or of one by its index.
const DeviceProperties& device_properties();
const DeviceProperties& device_properties(int device);

// Whether this build ships code for the current device: sm_90 (sm_90a) or the sm_10x family (sm_100f).
bool device_is_supported();

// One line that names the device's architecture and the shipped ones.
const char* unsupported_device_message();

}  // namespace dflash
