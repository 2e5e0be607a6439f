# SPDX-License-Identifier: Apache-2.0
# find_package(dflash) for C++ programs with libtorch: dflash::dflash brings dflash/ops.h, registers torch.ops.dflash at
# load and links torch. dflash_CUDA says whether the CUDA kernels come with it.
# NOTE: no line may name the build's torch: one dflash serves every torch from 2.11 on.
include(CMakeFindDependencyMacro)
find_dependency(Torch)

get_filename_component(dflash_PREFIX "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(dflash_LIBRARY_DIR "${dflash_PREFIX}/lib")

set(dflash_CUDA OFF)
if(EXISTS "${dflash_LIBRARY_DIR}/libdflash_cuda.so" AND TARGET torch_cuda)
  set(dflash_CUDA ON)
endif()

if(NOT TARGET dflash::dflash)
  add_library(dflash::dflash INTERFACE IMPORTED)
  target_include_directories(dflash::dflash INTERFACE "${dflash_PREFIX}/include")
  target_compile_features(dflash::dflash INTERFACE cxx_std_17)
  target_link_libraries(dflash::dflash INTERFACE "${TORCH_LIBRARIES}")
  # Nothing in a program refers to the libraries by symbol: they register the ops when they are loaded.
  set(dflash_link "-Wl,--push-state,--no-as-needed" "${dflash_LIBRARY_DIR}/libdflash_ops.so")
  if(dflash_CUDA)
    list(APPEND dflash_link "${dflash_LIBRARY_DIR}/libdflash_cuda.so")
  endif()
  target_link_libraries(dflash::dflash INTERFACE ${dflash_link} "-Wl,--pop-state")
endif()
