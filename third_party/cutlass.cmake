# SPDX-License-Identifier: Apache-2.0
# CUTLASS headers: -DCUTLASS_DIR, else the installed nvidia-cutlass package, else an error with the command to run.
if(NOT CUTLASS_DIR)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE cutlass_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(cutlass_package AND EXISTS "${cutlass_package}/source/include/cute/tensor.hpp")
    set(CUTLASS_DIR "${cutlass_package}/source")
  endif()
endif()
if(NOT CUTLASS_DIR OR NOT EXISTS "${CUTLASS_DIR}/include/cute/tensor.hpp")
  message(FATAL_ERROR "dflash: CUTLASS headers not found (CUTLASS_DIR='${CUTLASS_DIR}'). "
    "Run: pip install --no-deps nvidia-cutlass==4.2.0.0   or pass -DCUTLASS_DIR=<a CUTLASS checkout>")
endif()
message(STATUS "dflash: CUTLASS headers in ${CUTLASS_DIR}/include")
add_library(cutlass_headers INTERFACE)
target_include_directories(cutlass_headers SYSTEM INTERFACE "${CUTLASS_DIR}/include")
