// SPDX-License-Identifier: Apache-2.0
// dflash._C: a small window without tensors, for `dflash info` and the tests. Nothing needs it to run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "kernels/common/philox.h"

namespace py = pybind11;

namespace {

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> items;
  std::string item;
  for (const char c : list + ",") {
    if (c != ',') {
      item += c;
    } else if (!item.empty()) {
      items.push_back("sm_" + item.substr(0, item.find('-')));
      item.clear();
    }
  }
  return items;
}

py::dict build_info() {
  py::dict info;
  info["cuda_architectures"] = split(DFLASH_BUILD_CUDA_ARCHITECTURES);
  info["cuda_version"] = std::string(DFLASH_BUILD_CUDA_VERSION);
  info["compiler"] = std::string(__VERSION__);
  return info;
}

std::vector<uint32_t> philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  const dflash::Philox4 words = dflash::philox4x32_10(key, c0, c1, c2, c3);
  return {words.x[0], words.x[1], words.x[2], words.x[3]};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts and test hooks of dflash.";
  m.def("build_info", &build_info, "Architectures, CUDA and C++ compiler of this build.");
  m.def("philox", &philox, "Philox4x32-10 of a 64-bit key and a 128-bit counter, as the samplers use it.");
}
