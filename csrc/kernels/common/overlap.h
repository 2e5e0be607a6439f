// SPDX-License-Identifier: Apache-2.0
// A launch whose start overlaps the end of the kernel before it in the stream (programmatic
// dependent launch). Captured, the overlap becomes an edge of the graph.
#pragma once

#include <cuda_runtime.h>

namespace dflash {

// Until every kernel before this one is done: what they wrote can be read, what they read can be
// written. Called in every CTA, also one without work, before it touches anything but parameters and
// weights; threads that do not call it have to be ordered behind one that did.
__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
}

// The next kernel may start once every CTA has said so; it waits for this one's end in turn.
__device__ __forceinline__ void let_successor_start() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}

inline cudaLaunchAttribute overlap_attribute() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// The kernel calls wait_for_predecessor.
template <typename... Params>
cudaError_t launch_overlapped(void (*kernel)(Params...), dim3 grid, unsigned threads,
                              size_t smem_bytes, cudaStream_t stream, const Params&... params) {
  cudaLaunchAttribute attribute = overlap_attribute();
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace dflash
