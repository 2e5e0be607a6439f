# SPDX-License-Identifier: Apache-2.0
# find_package(dflash) for C++ programs with libtorch: dflash::dflash brings dflash/ops.h, registers torch.ops.dflash at
# load and links torch, found as find_package(Torch) finds it: CMAKE_PREFIX_PATH or Torch_DIR. dflash_CUDA says whether
# the CUDA kernels come with it.
# NOTE: no line may name the build's torch: one dflash serves every torch from 2.11 on.
get_filename_component(dflash_LIBRARY_DIR "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
get_filename_component(dflash_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../../../include" ABSOLUTE)

# Not find_package(Torch): with a CUDA build of torch it demands a whole CUDA toolkit, and no caller of the ops needs one.
find_path(dflash_TORCH_CONFIG TorchConfig.cmake HINTS ${Torch_DIR} PATH_SUFFIXES Torch share/cmake/Torch)
if(NOT dflash_TORCH_CONFIG)
  set(dflash_FOUND FALSE)
  set(dflash_NOT_FOUND_MESSAGE "torch was not found: put torch.utils.cmake_prefix_path into CMAKE_PREFIX_PATH")
  return()
endif()
get_filename_component(dflash_TORCH "${dflash_TORCH_CONFIG}/../../.." ABSOLUTE)

set(dflash_libraries libdflash_ops.so)
set(dflash_torch_libraries libtorch.so libtorch_cpu.so libc10.so)
set(dflash_CUDA OFF)
if(EXISTS "${dflash_TORCH}/lib/libtorch_cuda.so")
  list(APPEND dflash_torch_libraries libtorch_cuda.so libc10_cuda.so)
  if(EXISTS "${dflash_LIBRARY_DIR}/libdflash_cuda.so")
    list(APPEND dflash_libraries libdflash_cuda.so)
    set(dflash_CUDA ON)
  endif()
endif()
list(TRANSFORM dflash_libraries PREPEND "${dflash_LIBRARY_DIR}/")
list(TRANSFORM dflash_torch_libraries PREPEND "${dflash_TORCH}/lib/")

if(NOT TARGET dflash::dflash)
  add_library(dflash::dflash INTERFACE IMPORTED)
  target_include_directories(dflash::dflash INTERFACE "${dflash_INCLUDE_DIR}")
  target_include_directories(dflash::dflash SYSTEM INTERFACE "${dflash_TORCH}/include"
    "${dflash_TORCH}/include/torch/csrc/api/include")
  target_compile_features(dflash::dflash INTERFACE cxx_std_20)
  # Nothing in a program refers to these by symbol: the ops, and torch's CUDA backend, register themselves when loaded.
  target_link_libraries(dflash::dflash INTERFACE "-Wl,--push-state,--no-as-needed"
    ${dflash_libraries} ${dflash_torch_libraries} "-Wl,--pop-state")
endif()
